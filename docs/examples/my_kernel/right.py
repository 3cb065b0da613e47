"""An entry module: the whole pipeline with my kernel in it."""

import sys

from pipelines.agentic import main


def install() -> None:
    # Here the environment is applied and nothing of the pipeline is imported, so that it picks up what is replaced.
    # torch must not be imported before: its settings are read then.
    import torch.nn.functional as F
    from silu import my_silu

    F.silu = my_silu


if __name__ == "__main__":
    sys.exit(main(prepare=install))
