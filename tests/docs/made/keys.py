"""Writes ``docs/keys.md`` from the schema: each key with its default, what it decides, and its meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from mock_scheduler.command_program.config import CommandConfig
from mock_scheduler.config.base import ConfigSection, Decides, KeyEffects, effects_of, is_section, list_alternatives
from pipelines.config.schema import PipelineConfig
from tests.docs.made.docstrings import in_a_cell, paragraphs, split_docstring, table

_HEAD = """# Keys

*For whoever looks up a key; to look things up.*

Every key of a configuration, with its default, what it decides and what it means. The page
[configuration](configuration.md) explains how they work together. This page is written by `launch/docs.sh` from the
models that check a configuration (`pipelines/config/schema.py` and the modules that it imports).

`mock-scheduler config NAME` prints all keys of a configuration with their values. `*` in a key stands for a name of
your choice. What a key *decides* is what rests on its value:

{decides}
"""

#: By key, where a page explains it: the longest beginning counts.
_PAGES = {
    "rollout_mock": "configuration.md#rollout_mock",
    "parallel": "layouts.md",
    "model": "configuration.md#the-model",
    "model.num_moe_experts": "configuration.md#models-with-experts",
    "training": "configuration.md#batches",
    "algorithm": "rollout_correction.md",
    "align": "align.md",
    "align.executor": "align.md#on-a-cluster",
    "align.proofs": "verdicts.md#the-ladder-of-proofs",
    "trace": "trace.md",
    "order": "layouts.md#order-emulation",
    "graft": "localisation.md#grafts",
    "perturbation": "verdicts.md",
    "actor_infer": "engines.md",
    "custom_envs": "configuration.md#environments",
    "env_workers": "ray.md",
    "train_env_manager": "configuration.md#environments",
    "val_env_manager": "configuration.md#environments",
    "text": "text.md",
    "sft": "text.md#a-supervised-start",
    "critic": "algorithms.md",
    "kl_in_reward": "algorithms.md",
    "reward_normalization": "algorithms.md",
    "debug": "nexrl.md",
    "rollout_worker": "nexrl.md",
    "training_service": "remote.md",
    "system_envs": "determinism.md",
    "checkpoint_config": "configuration.md#checkpoints",
}


def render_keys() -> str:
    """Returns the page."""
    told = _members(Decides)
    facts = "\n".join(
        f"- {fact.name.lower() if fact.name else 'nothing'}: {in_a_cell(told[str(fact.name)])}"
        for fact in (Decides.NOTHING, *Decides)
    )
    parts = [_HEAD.format(decides=facts)]
    effects = effects_of(PipelineConfig)
    parts += _describe(PipelineConfig, "", effects, "A run of the pipeline", {})
    parts.append(
        "## Any program\n\nA file with a top-level `command` has these keys at its top\n"
        "([any program](any_program.md)), and the sections of the same names as above.\n"
    )
    parts.append(_table_of(CommandConfig, "", effects_of(CommandConfig)) + "\n")
    # YAML's word; docstrings have Python's.
    return "\n".join(parts).replace("`None`", "`null`").rstrip() + "\n"


def _members(flag: type[Enum]) -> dict[str, str]:
    """Returns the docstrings beneath a flag's members."""
    import ast
    import inspect
    import textwrap

    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(flag))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        ast.unparse(item.targets[0]): inspect.cleandoc(str(ast.literal_eval(text.value)))
        for item, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(item, ast.Assign) and isinstance(text, ast.Expr)
    }


def _describe(
    schema: type[ConfigSection], prefix: str, effects: KeyEffects, title: str, told: dict[type, str]
) -> Iterator[str]:
    """Yields a section's part of the page, and those of the sections inside it; ``told``: titles by section."""
    prose, _ = split_docstring(schema, schema.model_fields)
    page = _find_page(prefix)
    yield f"## {title}\n\n{paragraphs(prose)}" + (f"\n\n[More]({page})." if page else "") + "\n"
    if schema in told:
        yield f"It has the keys of {told[schema]}.\n"
        return
    told[schema] = title
    yield _table_of(schema, prefix, effects) + "\n"
    for name, info in schema.model_fields.items():
        for key, section in _sections_in(info.annotation, f"{prefix}{name}"):
            yield from _describe(section, f"{key}.", effects, f"`{key}`{_kind_of(info, section)}", told)


def _kind_of(info: FieldInfo, section: type[ConfigSection]) -> str:
    """Says which of several sections of one key this is."""
    several = [kind for kind in list_alternatives(info.annotation) if is_section(kind)]
    inside = [
        item
        for kind in list_alternatives(info.annotation)
        if get_origin(kind) in (dict, list)
        for item in list_alternatives(get_args(kind)[-1])
    ]
    name = re.sub("(Executor|Env)?Config$", "", section.__name__)
    return f" ({name})" if len([*several, *inside]) > 1 else ""


def _sections_in(annotation: Any, key: str) -> Iterator[tuple[str, type[ConfigSection]]]:
    for kind in list_alternatives(annotation):
        if is_section(kind):
            yield key, kind
        elif get_origin(kind) in (dict, list):
            yield from _sections_in(get_args(kind)[-1], f"{key}.*")


def _table_of(schema: type[ConfigSection], prefix: str, effects: KeyEffects) -> str:
    _, items = split_docstring(schema, schema.model_fields)
    rows = []
    for name, info in schema.model_fields.items():
        key = f"{prefix}{name}"
        if list(_sections_in(info.annotation, key)) and key not in effects.by_key:
            continue  # a section of its own
        rows.append((f"`{name}`", _default(info), _decides(effects, key), _meaning(items.get(name, ""), info)))
    return table(("key", "default", "decides", "meaning"), rows)


def _meaning(text: str, info: FieldInfo) -> str:
    """Returns the meaning as a sentence, and the values that it does not name."""
    text = in_a_cell(text)
    values = _values(info.annotation, text)
    text = f"{text[:1].upper()}{text[1:]}".rstrip(".")
    return " ".join(part for part in (f"{text}." if text else "", values) if part)


def _decides(effects: KeyEffects, key: str) -> str:
    facts = effects.of(key)
    return ", ".join(str(fact.name).lower() for fact in facts) or "nothing"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, ConfigSection) or (isinstance(value, dict) and value):
        return "below"
    return f"`{_yaml(value)}`"


def _yaml(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_yaml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value) or "''"


def _values(annotation: Any, text: str) -> str:
    """Says the values that a key may have, where they are a list and the text does not name each."""
    choices = [
        str(choice)
        for kind in list_alternatives(annotation)
        if str(get_origin(kind)) == "typing.Literal"
        for choice in get_args(kind)
    ]
    return (
        f"One of {', '.join(f'`{choice}`' for choice in choices)}."
        if len(choices) > 1 and any(f"`{choice}`" not in text for choice in choices)
        else ""
    )


def _find_page(prefix: str) -> str:
    key = prefix.removesuffix(".")
    found = [known for known in _PAGES if key == known or key.startswith(f"{known}.")]
    return _PAGES[max(found, key=len)] if found else ""
