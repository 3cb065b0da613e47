"""The same entry module with the wrong kernel."""

import sys

from pipelines.agentic import main


def install() -> None:
    import torch.nn.functional as F
    from silu import wrong_silu

    F.silu = wrong_silu


if __name__ == "__main__":
    sys.exit(main(prepare=install))
