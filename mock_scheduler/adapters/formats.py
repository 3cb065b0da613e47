"""The one table of files of others: what ``import`` reads, what ``export`` writes, and what is in them.

Contract: imports nothing heavy, since the help of the commands is made of it; a format's module is loaded when it is
used. ``docs/import_export.md`` has the same rows; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from mock_scheduler.errors import ConfigError

_IMPORTS = "mock_scheduler.adapters.imports"


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignFormat:
    """One kind of files.

    Attributes:
        name: for the command line.
        framework: that writes them, and its switch.
        source: the file or folder to give.
        lacks: what they never say and a recording needs, in words.
        reader: ``module:function`` from a path and ``ImportOptions`` to steps; "": they cannot be read safely.
        writer: ``module:function`` from a recording's steps to files; "": they are not written.
        refusal: why they are not read, and what to do; "" where they are.
        tracer: ``module:function`` from a path and a folder to the steps of each trace in it, of values inside of
            training steps.
    """

    name: str
    framework: str
    source: str
    lacks: str
    reader: str = ""
    writer: str = ""
    refusal: str = ""
    tracer: str = ""

    @property
    def becomes(self) -> str:
        """What its files become: ``recording``, ``trace``, or nothing."""
        return "recording" if self.reader else "trace" if self.tracer else ""


_SAMPLING = "sampling parameters"

FORMATS = (
    ForeignFormat(
        name="slime",
        framework="slime, miles, vime: --save-debug-rollout-data",
        source="{rollout_id}.pt and eval_{rollout_id}.pt: a file, or their folder",
        lacks=_SAMPLING,
        reader="mock_scheduler.adapters.slime.files:read_rollouts",
        writer="mock_scheduler.adapters.slime.files:write_rollouts",
    ),
    ForeignFormat(
        name="miles-columns",
        framework="miles: dashboard_columns, beside --save-debug-rollout-data",
        source="rollout_{id}.parquet: a file, or their folder (needs the extra parquet)",
        lacks=f"{_SAMPLING}, rewards, groups, policy versions, how rows ended",
        reader=f"{_IMPORTS}.miles_columns:read_rollouts",
    ),
    ForeignFormat(
        name="verl-v0",
        framework="verl: skip.rollout, skip.async_rollout, trainer.use_v1=false; DataProto.save_to_disk",
        source="{step}/gen_batch.dp: a file, or the folder GBS…_N…",
        lacks=f"{_SAMPLING}, policy versions",
        reader=f"{_IMPORTS}.data_protos:read_verl",
    ),
    ForeignFormat(
        name="verl-v1",
        framework="verl: skip.rollout_tq",
        source="{step}/{inner}/tq_batch.pt: a file, or the folder GBS…_N…",
        lacks=_SAMPLING,
        reader=f"{_IMPORTS}.verl_v1:read_rollouts",
    ),
    ForeignFormat(
        name="roll",
        framework="ROLL: rollout_mock, mode dump",
        source="train/step_{step}.pkl and val/…: a file, or their folder",
        lacks=f"{_SAMPLING}, policy versions",
        reader=f"{_IMPORTS}.data_protos:read_roll",
    ),
    ForeignFormat(
        name="areal",
        framework="AReaL: trajectory_debug (pull request 1407)",
        source="step_{step}.pt or step_{step}_dp_{rank}.pt: a file, or their folder",
        lacks=f"{_SAMPLING}, groups where they are not given by --group-size",
        reader=f"{_IMPORTS}.areal:read_rollouts",
    ),
    ForeignFormat(
        name="prime-rl",
        framework="prime-rl: transport.type=filesystem",
        source="rollouts/step_{step}/rank_{rank}.bin: a file, or the folder rollouts",
        lacks="top_p, top_k, rewards (advantages are there), groups, policy versions, how rows ended",
        reader=f"{_IMPORTS}.prime_rl:read_rollouts",
    ),
    ForeignFormat(
        name="megatron-rl",
        framework="Megatron-LM: megatron/rl with LANGRL_LOG_DIR",
        source="rollouts_rank{rank}_iteration{iteration}_{environments}.json: a file, or their folder",
        lacks=f"{_SAMPLING}, policy versions where rollouts state none",
        reader=f"{_IMPORTS}.megatron_rl:read_rollouts",
    ),
    ForeignFormat(
        name="rollout-bank",
        framework="Megatron-LM: --rl-durable-rollout-bank",
        source="the folder with MANIFEST.json",
        lacks=f"{_SAMPLING}, policy versions; log-probabilities are float16",
        reader=f"{_IMPORTS}.rollout_bank:read_rollouts",
    ),
    ForeignFormat(
        name="nexrl",
        framework="NexRL: debug dump",
        source="trajectory/step_{step}.pt or .jsonl: a file, or their folder",
        lacks=f"{_SAMPLING} but the temperature, log-probabilities, policy versions, how rows ended",
        reader=f"{_IMPORTS}.nexrl:read_rollouts",
    ),
    ForeignFormat(
        name="nemo-rl",
        framework="NeMo-RL: the logger's own files of training data",
        source="train_data_step{step}.jsonl: a file, or their folder",
        lacks=f"{_SAMPLING}, groups where they are not given by --group-size, policy versions, how rows ended",
        reader=f"{_IMPORTS}.nemo_rl:read_rollouts",
    ),
    ForeignFormat(
        name="vime-gradients",
        framework="vime: --ci-save-parameter-grads",
        source="the folder of one role, with rollout-{N}/step-{M}/rank-{R}.pt",
        lacks="all but gradients",
        tracer=f"{_IMPORTS}.gradients:write_vime",
    ),
    ForeignFormat(
        name="megatron-saved",
        framework="Megatron-LM: --save-wgrads-interval, --save-params-interval",
        source="the folder with wgrads/iter_{N}/mp_rank_….pth or params/…",
        lacks="how tensors are split: two runs of one layout can be compared",
        tracer=f"{_IMPORTS}.gradients:write_megatron",
    ),
    ForeignFormat(
        name="sglang-dumper",
        framework="SGLang's dumper, in SGLang and miles: DUMPER_ENABLE=1, --dumper-enable",
        source="the folder of one experiment, with step=…___rank=…___dump_index=…___name=….pt",
        lacks="how tensors are split, where their dims were not dumped: two runs of one layout can be compared",
        tracer=f"{_IMPORTS}.sglang:write_dumps",
    ),
    ForeignFormat(
        name="msprobe",
        framework="msprobe: PrecisionDebugger, task tensor",
        source="dump_path, with step{N}/rank{R}/dump.json and dump_tensor_data, or one step's folder",
        lacks="how tensors are split: two runs of one layout can be compared",
        tracer=f"{_IMPORTS}.msprobe:write_dumps",
    ),
    ForeignFormat(
        name="rl-kernel",
        framework="RL-Kernel: Capture and AutoCapture of its consistency debugger",
        source="the folder with capture-manifest.json and captures/",
        lacks="all but outputs of the forward pass; two traces are made, training and rollout",
        tracer=f"{_IMPORTS}.rl_kernel:write_captures",
    ),
    ForeignFormat(
        name="relax",
        framework="Relax: RELAX_REPLAY_CAPTURE=1",
        source="RELAX_REPLAY_CAPTURE_DIR, with one folder a bundle, or one bundle",
        lacks="tokens, so that it is a trace: of log-probabilities, advantages, entropy and the reported losses",
        tracer=f"{_IMPORTS}.relax:write_bundles",
    ),
    ForeignFormat(
        name="megatron-determinism",
        framework="Megatron-LM: --determinism-trace-dir",
        source="rank_{R}.jsonl",
        lacks="",
        refusal=(
            "it holds digests of tensors and no values, so there is nothing to compare by size. Its own "
            "tools/determinism/compare_traces.py says which digest is another; megatron.attach writes values"
        ),
    ),
    ForeignFormat(
        name="skyrl",
        framework="SkyRL: trainer.dump_data_batch",
        source="global_step_{step}_training_input.pkl",
        lacks="",
        refusal=(
            "it is a pickle of classes of SkyRL's own, whose reading would run code. Record it in SkyRL itself "
            "(build_scheduler), or save its tensors as plain values with torch.save"
        ),
    ),
)

FORMAT_NAMES = tuple(one.name for one in FORMATS)
WRITTEN_NAMES = tuple(one.name for one in FORMATS if one.writer)


def find_format(name: str) -> ForeignFormat:
    """Finds a format by its name; raises ``ConfigError`` that lists all of them."""
    found = next((one for one in FORMATS if one.name == name), None)
    if found is None:
        near = get_close_matches(name, FORMAT_NAMES, n=1)
        hint = f" (do you mean {near[0]}?)" if near else ""
        raise ConfigError(f"{name!r} is no format of files that are read{hint}; known are {', '.join(FORMAT_NAMES)}")
    return found
