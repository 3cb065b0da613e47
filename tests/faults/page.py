"""``docs/faults.md``: what the catalogue is, what each column proves, the matrix, and what is said of every fault."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.campaign import CLEAN
from tests.faults.catalogue import FAULTS
from tests.faults.judging import Judgement
from tests.faults.table import summarise, to_markdown

_HEAD = """# The fault catalogue

*Made by `python -m tests.faults --markdown docs/faults.md`; change `tests/faults/`, not this page.*

`tests/faults/catalogue.py` lists {num_faults} faults: those of published bug reports that can be injected on a CPU,
more of the same kinds, and bugs of megatron-core itself, which its configuration alone brings out. Each is put into the
real training step for one run, counts how often it did its harm, and is taken back. Nothing that looks for faults knows
of the catalogue.

A fault is **found** where at least one of the proofs finds it that a verdict rests on (replicas, noise, slope,
emulation). It is found **at its place** where the first divergence, in the order of computation, is in the phase, the
update and the tensor that the catalogue names; a detection that names another place counts as half. It is **called by
its word** where the sentence says what it looks like, as `2.000 times the baseline`. It is **silent** where the same
injection into another layout, in which it must do no harm, changes no bit of that run: one such run has all faults of
its layout in it at once. A fault that never fired is an error.

| column | what it compares | who else has it |
|---|---|---|
| loss | the step's loss, to four printed digits | any log |
| norm | ‖a−b‖ / ‖a‖ of each main gradient of the first update against 10⁻⁵, in bfloat16 10⁻² | fixed tolerances |
| sglang | 1 − 2⟨a, b⟩ / (‖a‖² + ‖b‖²) of the same against 10⁻³ | sglang's comparator, by default |
| replicas | copies of one tensor on several ranks of the candidate, to the last bit | |
| noise | every tensor against what one rounding of the baseline's weights makes of it | |
| slope | the scale of gradients, and places within a tensor, of what is within its noise | |
| emulation | the candidate with one process that adds in the candidate's order, to the last bit | |

`-`: the proof lets it pass. `n/a`: there is no such proof for the run, as where a layout's order is not emulated, or a
clean run of the layout is not equal to it either. Rows named `{clean} (...)` are clean runs of every layout that a
fault is put into: anything found there is a false alarm. *loss equal*: the first update's loss has every bit of the
clean run's, so that no loss curve could begin to show the fault.

Of the faults that reference lists have, one cannot be run here: amax groups of fp8 need TransformerEngine and a GPU.
A recomputation that draws other random numbers needs dropout, which the pipeline does not have; the catalogue has a
recomputation that computes something else in its place. Parameters that are gathered too late need CUDA streams; in
their place the gathering is left out.
"""


def render_page(judgements: Sequence[Judgement]) -> str:
    """The whole page."""
    head = _HEAD.format(num_faults=len(FAULTS), clean=CLEAN)
    summary = "".join(f"- {line}\n" for line in summarise(judgements).splitlines())
    return (
        f"{head}\n## Summary\n\n{summary}\n## The matrix\n\n{to_markdown(judgements)}\n"
        f"## What is said of each\n\n{_describe(judgements)}"
    )


def _describe(judgements: Sequence[Judgement]) -> str:
    """Every fault: what it is, where it must be found, and the sentence in each precision."""
    parts = []
    for fault in FAULTS:
        own = [item for item in judgements if item.fault == fault.id]
        if not own:
            continue
        number = f" ({fault.number})" if fault.number else ""
        expected = fault.expected
        where = f"In {fault.shows.label}; silent in {fault.silent.label}."
        parts.append(f"**{fault.id}**{number}: {fault.description}. {where}")
        parts.append(f"Expected: {expected.phase}, update {expected.update}, `{'` or `'.join(expected.names)}`.\n")
        parts += [f"- {item.precision}: {item.sentence or 'no divergence'}" for item in own]
        parts.append("")
    return "\n".join(parts)
