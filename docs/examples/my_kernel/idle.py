"""An entry module that replaces a class of which the model has none, so its code never acts."""

import sys

from pipelines.agentic import main


def install() -> None:
    import torch

    class MyLayerNorm(torch.nn.LayerNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    torch.nn.LayerNorm = MyLayerNorm  # the quickstart's model has RMSNorm


if __name__ == "__main__":
    sys.exit(main(prepare=install))
