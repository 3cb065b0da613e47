"""The rollout function of slime's family, before the real one: it records, replays, or lets live answers through.

    --rollout-function-path mock_scheduler.adapters.slime.rollouts.generate_rollout     (slime, vime)
    --rollout-function-path mock_scheduler.adapters.slime.rollouts.RolloutFunction      (miles)

Contract: live, the real function's own output is returned. A replay gives the same nesting of samples with every field,
builds and calls nothing, and draws the prompts that the rollout drew from the data source, so that a checkpoint made in
a replay goes on where a live one would. Where the framework names the present version of the weights (miles), samples
of a replay state it, as they would after a live rollout. Evaluation is not recorded; a replay has none.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mock_scheduler.adapters.settings import describe_keys, load_settings
from mock_scheduler.adapters.slime.codec import SlimeCodec
from mock_scheduler.adapters.slime.evaluation import FamilyCodec, has_samples
from mock_scheduler.adapters.slime.settings import SlimeSettings
from mock_scheduler.adapters.slime.suppress import check_switch
from mock_scheduler.batch import SamplingParams
from mock_scheduler.errors import ConfigError, SchedulerError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.core import RECORDED_PREFIX
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON

#: Where a data source of the family stands: attributes of ``RolloutDataSource``.
_CURSOR = ("epoch_id", "sample_offset", "sample_group_index", "sample_index")
#: Arguments of the framework that a replay must share.
_CONTRACT = (
    *("hf_checkpoint", "prompt_data", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len"),
    *("rollout_temperature", "rollout_top_p", "rollout_top_k", "rollout_seed", "rollout_shuffle", "reward_key"),
    *("rm_type", "custom_rm_path", "custom_generate_function_path"),
)


class RolloutFunction:
    """One rollout function of a run.

    miles makes it with an object that has ``args`` and ``data_source``, and calls it with one that has ``rollout_id``,
    ``weight_version`` and ``evaluation``.
    """

    def __init__(
        self,
        input: Any = None,  # noqa: ANN401 - the framework's, by its name
        *,
        settings: SlimeSettings | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.args: Any = getattr(input, "args", None)
        self.data_source: Any = getattr(input, "data_source", None)
        self.ledger = Ledger() if ledger is None else ledger
        self._input = input
        self._settings = load_settings(SlimeSettings, settings)
        self._scheduler: ProxyScheduler | None = None
        self._real: Any = None
        self._arguments: tuple[Any, ...] = ()
        self._options: dict[str, Any] = {}
        self._output: Any = None
        self._newest = -1  # rollout that was asked for

    def __call__(self, input: Any) -> Any:  # noqa: ANN401 - the framework's, by its name
        """Answer miles' call."""
        self._arguments, self._options = (input,), {}
        stated = str(getattr(input, "weight_version", None))
        version = int(stated) if stated.isascii() and stated.isdecimal() else None
        return self._answer(input.rollout_id, is_evaluation=bool(input.evaluation), version=version)

    def generate(self, args: Any, rollout_id: int, data_source: Any, *, evaluation: bool) -> Any:  # noqa: ANN401
        """Answer slime's call."""
        self.args, self.data_source = args, data_source
        self._arguments, self._options = (args, rollout_id, data_source), {"evaluation": evaluation}
        return self._answer(rollout_id, is_evaluation=evaluation, version=None)

    def save(self, rollout_id: int) -> None:
        """Keep nothing: the framework saves its data source."""

    def load(self, rollout_id: int | None = None) -> None:
        """Load nothing: the framework loads its data source."""

    def close(self) -> None:
        """Write the rest."""
        if self._scheduler is not None:
            self._scheduler.close()

    def play(self) -> Any:  # noqa: ANN401 - the framework's
        """Call the real function as the framework has called this one, once for each of its calls."""
        if self._real is None:
            found: Any = _find(self._settings.real)
            self._real = found(self._input) if isinstance(found, type) else found
            self.ledger.count("built", "rollout_function")
        if self._output is None:
            self._output = self._real(*self._arguments, **self._options)
        return self._output

    def read_cursor(self) -> dict[str, JSON]:
        """Tell where the data source stands; nothing where it does not say."""
        found = {name: getattr(self.data_source, name, None) for name in _CURSOR}
        return {name: value for name, value in found.items() if type(value) is int}

    def _answer(self, rollout_id: int, *, is_evaluation: bool, version: int | None) -> Any:  # noqa: ANN401
        scheduler, self._output = self._open(), None
        if is_evaluation:
            return self._evaluate(scheduler, rollout_id, version)
        before = self.read_cursor()
        request = RolloutRequest(
            global_step=rollout_id,
            batch_size=int(self.args.rollout_batch_size) * int(self.args.n_samples_per_prompt),
            # Counted in rollouts: a replay sends no weights, and so has no other count.
            policy_version=rollout_id,
            data_cursor=before or None,
        )
        samples = self._get(scheduler, request)
        self._newest = rollout_id
        if self._output is not None:
            return self._output
        self._advance(before, scheduler.state_dict()["scheduler"], rollout_id)
        output_type = self._find_output("RolloutFnTrainOutput")
        return output_type(samples=self._as_samples(samples, version), metrics=_recorded_metrics(scheduler))

    def _evaluate(self, scheduler: ProxyScheduler, rollout_id: int, version: int | None) -> Any:  # noqa: ANN401
        step = rollout_id + (rollout_id <= self._newest)
        mode = self._settings.mock_config().mode_of(step=step, kind="val", scheduler_id="default")
        is_recorded = self._settings.record_evaluation
        if mode == "mock" and not is_recorded:
            self.ledger.count("suppressed", "evaluation")
            return self._find_output("RolloutFnEvalOutput")(data={}, metrics={})
        if not is_recorded or (mode == "dump" and not has_samples(_read_datasets(self.play()))):
            self.ledger.count("called", "evaluation_without_record")
            return self.play()
        request = RolloutRequest(global_step=step, batch_size=1, has_open_size=True, mode="val", policy_version=step)
        datasets = self._get(scheduler, request)
        if self._output is not None:
            return self._output
        data = {
            name: {key: self._as_samples(value, version) if key == "samples" else value for key, value in about.items()}
            for name, about in datasets.items()
        }
        return self._find_output("RolloutFnEvalOutput")(data=data, metrics=_recorded_metrics(scheduler))

    def _get(self, scheduler: ProxyScheduler, request: RolloutRequest) -> Any:  # noqa: ANN401 - by the request's mode
        """Ask; afterwards ``_output`` is what the real function gave, ``None`` where nothing was played."""
        found = scheduler.get_batch(request)
        if self._output is not None:
            scheduler.state_dict()  # returns when the step is on disk: nobody tells this function that the run ends
        return found

    def _find_output(self, name: str) -> Any:  # noqa: ANN401 - a class of the framework
        return _find(f"{self._settings.package}.rollout.base_types.{name}")

    def _as_samples(self, nested: Any, version: int | None) -> Any:  # noqa: ANN401 - lists of samples
        return _as_samples(nested, _find(f"{self._settings.package}.utils.types.Sample"), version)

    def _open(self) -> ProxyScheduler:
        if self._scheduler is None:
            config = self._settings.mock_config()
            if config.missing_step != "error" and self.read_cursor():
                raise ConfigError(
                    f"rollout_mock.missing_step={config.missing_step} has no rollout that draws prompts from the data "
                    "source, so that these would stand still: set it to error, and replay recorded steps only"
                )
            check_switch(self.args, config, self._settings, self.ledger)
            self._scheduler = build_scheduler(
                config,
                lambda: _Live(self),
                {**describe_arguments(self.args), **self._settings.contract},
                codec=make_codec(self.args),
                ledger=self.ledger,
                resume=self._settings.resume,
                provenance={"framework": self._settings.package},
            )
        return self._scheduler

    def _advance(self, before: Mapping[str, JSON], after: object, rollout_id: int) -> None:
        """Draw the prompts that the recorded rollout drew; raises where the source ends elsewhere."""
        if not isinstance(after, Mapping) or not before or after.keys() != before.keys():
            return
        drawn = after.get("sample_group_index", 0) - before.get("sample_group_index", 0)
        for _ in range(drawn):  # one by one: a source passes one end of an epoch at a time
            self.data_source.get_samples(1)
        now = self.read_cursor()
        if now != dict(after):
            raise SchedulerError(
                f"rollout {rollout_id}: its replay drew {drawn} groups of prompts, and the data source is at {now}; in "
                f"the recording it was at {dict(after)}. The data are others, or a partial rollout had left samples in "
                "the buffer"
            )


class _Live:
    """The real function as a rollout scheduler."""

    def __init__(self, owner: RolloutFunction) -> None:
        self._owner = owner
        self._metrics: dict[str, float] = {}

    def get_batch(self, request: RolloutRequest) -> Any:  # noqa: ANN401 - by the request's mode
        """Play, and give the samples' fields in their nesting, of an evaluation within their datasets."""
        output = self._owner.play()
        # Bare lists and dicts are taken as well, as the framework itself takes them.
        measured = {} if isinstance(output, list | dict) else output.metrics or {}
        self._metrics = {
            str(name): float(value)
            for name, value in measured.items()
            if isinstance(value, int | float | np.number) and math.isfinite(value)
        }
        if request.mode == "val":
            return _as_fields(_read_datasets(output))
        return _as_fields(output if isinstance(output, list) else output.samples)

    def collect_metrics(self) -> dict[str, float]:
        """Give the numbers that the function measured."""
        return self._metrics

    def state_dict(self) -> dict[str, JSON]:
        """Tell where the data source stands."""
        return self._owner.read_cursor()

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Do nothing: each replayed step has advanced the data source."""


def _as_fields(nested: Any) -> Any:  # noqa: ANN401 - samples in lists and mappings
    """Give the fields in place of each sample; every other value stays."""
    if isinstance(nested, list):
        return [_as_fields(item) for item in nested]
    if isinstance(nested, Mapping):
        return {name: _as_fields(item) for name, item in nested.items()}
    return nested.to_dict() if hasattr(nested, "to_dict") else nested


def _read_datasets(output: Any) -> Any:  # noqa: ANN401 - of an evaluation
    return output if isinstance(output, dict) else output.data


def _recorded_metrics(scheduler: ProxyScheduler) -> dict[str, float]:
    return {name.removeprefix(RECORDED_PREFIX): value for name, value in scheduler.collect_metrics().items()}


def _as_samples(nested: Any, sample_type: Any, version: int | None) -> Any:  # noqa: ANN401 - lists of samples
    if isinstance(nested, list):
        return [_as_samples(item, sample_type, version) for item in nested]
    stated = nested.get("weight_versions")
    if version is not None and stated:
        # As after a live rollout: the framework asserts that samples are of its present weights.
        nested = {**nested, "weight_versions": [str(version)] * len(stated)}
    return sample_type.from_dict(nested)


def make_codec(args: Any) -> FamilyCodec:  # noqa: ANN401 - the framework's
    """Make the codec of a run: an evaluation's samples have their own temperature and key of rewards."""
    key = getattr(args, "reward_key", None)
    train = SlimeCodec(sampling=read_sampling(args, "rollout"), reward_key=key)
    val_key = getattr(args, "eval_reward_key", None) or key
    return FamilyCodec(train, SlimeCodec(sampling=read_sampling(args, "eval"), reward_key=val_key))


def read_sampling(args: Any, kind: str) -> SamplingParams:  # noqa: ANN401 - the framework's
    """Read how tokens are sampled; a top-k below 1 turns it off. Without ``eval_*``, evaluation samples as rollouts.

    SGLang's log-probabilities are of the logits over the temperature: with top-p and top-k off, of what is sampled.
    """

    def read(name: str, default: float) -> float:
        found = getattr(args, f"{kind}_{name}", None)
        found = getattr(args, f"rollout_{name}", None) if found is None else found
        return default if found is None else found

    return SamplingParams(
        temperature=float(read("temperature", 1.0)),
        top_p=float(read("top_p", 1.0)),
        top_k=max(int(read("top_k", 0)), 0),
        logprobs_mode="processed",
    )


def describe_arguments(args: Any) -> dict[str, JSON]:  # noqa: ANN401 - the framework's
    """Describe what a replay must share with its recording."""
    return describe_keys(args, _CONTRACT, "slime")


def _find(path: str) -> Any:  # noqa: ANN401 - of the framework
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be imported: {error}") from error


@functools.cache
def _function_of_process() -> RolloutFunction:
    """Makes the one of this process: slime calls a function, and keeps no object."""
    return RolloutFunction()


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:  # noqa: ANN401
    """Answer slime's and vime's call, for ``--rollout-function-path`` and ``--eval-function-path``."""
    return _function_of_process().generate(args, rollout_id, data_source, evaluation=evaluation)
