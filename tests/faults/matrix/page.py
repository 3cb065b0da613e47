"""Renders ``docs/faults.md``, the catalogue and its columns, and ``docs/faults_found.md``, fault by fault."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.campaign import CLEAN
from tests.faults.catalogue import FAULTS
from tests.faults.matrix.judging import Judgement
from tests.faults.matrix.table import summarise, to_markdown

_HEAD = """# The fault catalogue

*For somebody who asks what is found; to look things up.*

*Made by `python -m tests.faults --markdown docs`. Change `tests/faults/`, not this page.*

`tests/faults/catalogue.py` lists {num_faults} faults: faults of published bug reports that can be injected on a CPU,
more of the same kinds, kinds that people planted who had not read the detectors (`tests/faults/planted.py`), and bugs
of megatron-core that its configuration alone brings out. A campaign puts each fault into the real training step for one
run, counts how often it did its harm, and takes it back. No detector knows the catalogue.

Each run is one step of two updates. Actions are of the whole vocabulary, so that every tp rank's part of the softmax
has targets in each update, and advantages are not 0 in either (`tests/faults/test_injected.py` holds this).

- A fault is **found** if at least one proof of a verdict finds it: replicas, noise, slope or emulation.
- It is found **at its place** if the first divergence, in the order of computation, is in the phase, the update and the
  tensor that the catalogue names. A detection that names another place counts half.
- It is **called by its word** if the sentence says how it looks, such as `2.000 times the baseline`.
- It is **silent** if the same injection into another layout, where it must do no harm, changes no bit of this run. One
  such run has all faults of its layout in it at once.
- A fault that never fired is an error. *Acted* 2 + 4 + 4 says how often it did: before the first update, in the first,
  and in the second.

| column | comparison | who else has it |
|---|---|---|
| loss | the step's loss, to four printed digits | any log |
| norm | ‖a−b‖ / ‖a‖ of each main gradient of the first update against 10⁻⁵, in bfloat16 10⁻² | fixed tolerances |
| sglang | 1 − 2⟨a, b⟩ / (‖a‖² + ‖b‖²) of the same against 10⁻³ | sglang's comparator, by default |
| replicas | copies of one tensor on several ranks of the candidate, to the last bit | |
| noise | every tensor against the effect of one rounding of the baseline's weights | |
| slope | the scale of gradients, and places within a tensor, of everything within its noise | |
| emulation | the candidate with one process that adds in the candidate's order, to the last bit | |

`-`: the proof lets the fault pass. `n/a`: the run has no such proof, because the order of its layout is not emulated or
a clean run of the layout does not equal the reference either. Rows named `{clean} (...)` are clean runs of every layout
with a fault: anything found there is a false alarm. *loss equal*: the first update's loss has every bit of the clean
run's, so no loss curve could begin to show the fault.

Three faults of the reference lists cannot run here. Amax groups of fp8 need TransformerEngine and a GPU. A
recomputation that draws other random numbers needs dropout, and the pipeline has none; the catalogue has a
recomputation that computes something else. Parameters that are gathered too late need CUDA streams; the catalogue
leaves the gathering out.
"""


_FOUND = """# The fault catalogue, fault by fault

*For somebody who looks for a kind of fault; to look things up.*

*Made by `python -m tests.faults --markdown docs`. [The fault catalogue](faults.md) explains the columns and the words.*

"""


def render_page(judgements: Sequence[Judgement]) -> str:
    """The page on the catalogue: how a fault is judged, and how many were found."""
    head = _HEAD.format(num_faults=len(FAULTS), clean=CLEAN)
    summary = "".join(f"- {line}\n" for line in summarise(judgements).splitlines())
    more = "[Fault by fault](faults_found.md) has the matrix, and what is said of each."
    return f"{head}\n## Summary\n\n{summary}\n{more}\n"


def render_found(judgements: Sequence[Judgement]) -> str:
    """The page of reference: the matrix, and the sentence on every fault."""
    return f"{_FOUND}## The matrix\n\n{to_markdown(judgements)}\n## What is said of each\n\n{_describe(judgements)}"


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
        parts += [f"- {item.precision}: {item.sentence or 'no divergence'}{describe_acted(item)}" for item in own]
        parts.append("")
    return "\n".join(parts)


def describe_acted(item: Judgement) -> str:
    """`` (acted 2 + 4 + 4 on rank 1)``; empty where the run itself is the fault."""
    counts = {rank: " + ".join(map(str, of_rank)) for rank, of_rank in enumerate(item.acted) if any(of_rank)}
    if not counts:
        return ""
    if len(counts) == len(item.acted) and len(set(counts.values())) == 1:
        return f" (acted {counts[0]} on each rank)"
    return f" (acted {', '.join(f'{text} on rank {rank}' for rank, text in counts.items())})"
