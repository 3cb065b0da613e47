"""Lists the eight checks: what each asks, its share of the time, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu_check.machine import Machine

#: The whole script, in seconds; the shares of the checks leave half a minute for the start.
LIMIT_S = 600.0
#: Compute capability of the first GPUs with FP8 products (Ada and Hopper).
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Holds one check: the module ``benchmarks.gpu_check.NAME``. budget_s: its share of ``LIMIT_S``."""

    name: str
    title: str
    question: str
    budget_s: float
    needs_transformer_engine: bool = False
    needs_fp8: bool = False


CHECKS: tuple[Check, ...] = (
    Check(
        name="determinism",
        title="Determinism",
        question="Does every setting take effect, and which operations and collectives repeat to the bit?",
        budget_s=90.0,
    ),
    Check(
        name="gemm_orders",
        title="Order emulation",
        question="Where does a split product have the bits of the whole one, and does emulation have the candidate's?",
        budget_s=30.0,
    ),
    Check(
        name="graphs",
        title="CUDA graphs",
        question="Is a captured training refused or observed, never silently missed?",
        budget_s=30.0,
    ),
    Check(
        name="training",
        title="Training",
        question="Does a step repeat, is it the CPU's but for rounding, and TransformerEngine what local layers are?",
        budget_s=140.0,
    ),
    Check(
        name="layouts",
        title="Layouts",
        question="Are tp2, pp2 and dp2, on one GPU, what one process computes?",
        budget_s=80.0,
    ),
    Check(
        name="faults",
        title="Faults",
        question="Are ten planted faults found, each at its place?",
        budget_s=80.0,
    ),
    Check(
        name="cost",
        title="Cost",
        question="What do attach, sketches and whole traces add to a step, and does the host wait within one?",
        budget_s=60.0,
    ),
    Check(
        name="fp8",
        title="FP8",
        question="What does a trace see of FP8 training, what does emulation refuse, and what does the noise say?",
        budget_s=60.0,
        needs_transformer_engine=True,
        needs_fp8=True,
    ),
)

_BY_NAME = {check.name: check for check in CHECKS}


def find_check(name: str) -> Check:
    """Finds a check; raises ``KeyError`` where no check is named so."""
    return _BY_NAME[name]


def find_obstacle(check: Check, machine: Machine) -> str:
    """Says why a check cannot be run on a machine; empty where it can."""
    if machine.lacking:
        return f"this Python lacks {', '.join(machine.lacking)}; carry their wheels (--wheels FOLDER)"
    if machine.device == "cuda" and not machine.gpus:
        return machine.cuda_problem or "no CUDA GPU is visible"
    if check.needs_transformer_engine and not machine.has_transformer_engine:
        return machine.transformer_engine
    if check.needs_fp8 and machine.capability < _FP8_CAPABILITY:
        found = ".".join(map(str, machine.capability))
        return f"FP8 products need compute capability 8.9, and the GPU has {found}"
    return ""
