"""The module named as a run's entry is found and run: ``python -P -m mock_scheduler.launch.entry MODULE ARGUMENTS``.

Python is started with ``-P``, so no file of the working directory stands before a module of Python or of an installed
package. An entry is found where Python finds any module, among installed packages and in the folders of ``PYTHONPATH``;
an entry of no such place is looked for in the working directory, which then comes last in the import path.

Contract: finding imports nothing. Standard library only, so every process of a run can import this first.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from mock_scheduler.errors import ConfigError, ExitCode
from mock_scheduler.support.processes import end_with_parent
from mock_scheduler.support.terminal_streams import print_message


def find_module(module: str) -> Path | None:
    """Returns the file behind ``python -m module``, as an entry is found; ``None`` where there is none to run."""
    names = module.split(".")
    spec = _find_elsewhere(names[0]) or _find_here(names[0])
    return None if spec is None else _find_below(spec, names)


def check_entry(module: str) -> None:
    """Raises ``ConfigError`` where there is no module of this name to run."""
    if find_module(module) is None:
        raise ConfigError(
            f"entry: there is no Python module {module!r} among the installed packages, in PYTHONPATH or in the "
            f"working directory {os.getcwd()}; install it, or name its folder in PYTHONPATH"
        )


def run_entry(module: str, arguments: Sequence[str]) -> None:
    """Runs a module as ``python -m`` does.

    Where it lies in the working directory alone, that comes last in the import path, for the modules beside it.
    """
    if _find_elsewhere(module.partition(".")[0]) is None:
        sys.path.append(os.getcwd())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def check_script(path: str, folder: Path | None = None) -> None:
    """Raises ``ConfigError`` where there is no Python file to run; ``folder``: where it starts, else this process's."""
    folder = folder or Path.cwd()
    if not (folder / path).is_file():
        raise ConfigError(
            f"there is no Python file {path} in {folder}; ranks run a file, or -m and a module, without the word "
            "python before it"
        )


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Runs a file as ``python FILE`` does: its own folder comes first in the import path."""
    sys.path.insert(0, str(Path(path).absolute().parent))
    sys.argv = [path, *arguments]
    # Python gives a script its absolute path as ``__file__``, by which many find what lies beside it.
    runpy.run_path(str(Path(path).absolute()), run_name="__main__")


def _find_elsewhere(top: str) -> ModuleSpec | None:
    """Finds a module or package without the working directory, unless ``PYTHONPATH`` names that."""
    here = os.getcwd()
    path = [folder for folder in sys.path if folder not in {"", here} or _is_chosen(folder)]
    for finder in sys.meta_path:
        spec = PathFinder.find_spec(top, path) if finder is PathFinder else finder.find_spec(top, None)
        if spec is not None:
            return spec
    return None


def _is_chosen(folder: str) -> bool:
    chosen = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return any(os.path.abspath(name) == os.path.abspath(folder) for name in chosen if name)


def _find_here(top: str) -> ModuleSpec | None:
    return PathFinder.find_spec(top, [os.getcwd()])


def _find_below(spec: ModuleSpec, names: Sequence[str]) -> Path | None:
    """Goes down from the first name's module to the last one's, or to the ``__main__`` of a package."""
    found: ModuleSpec | None = spec
    for name in names[1:]:
        found = _find_part(found, name)
    if found is not None and found.submodule_search_locations is not None:
        found = _find_part(found, "__main__")
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return None
    return Path(found.origin).absolute()


def _find_part(package: ModuleSpec | None, name: str) -> ModuleSpec | None:
    if package is None or package.submodule_search_locations is None:
        return None
    # By its last name alone: for a whole one Python asks the parent of a namespace, which would have to be imported.
    return PathFinder.find_spec(name, list(package.submodule_search_locations))


def main(arguments: Sequence[str]) -> int:
    """Runs the entry that the first argument names, with the others; ends with the process that started this one.

    Python's own exit code for an error, 1, may be a verdict of the entry's; so an error gives another one.
    """
    end_with_parent(os.environ)
    module, *others = arguments
    try:
        check_entry(module)
        run_entry(module, others)
    except ConfigError as error:
        print_message(f"error: {error}")
        return int(error.exit_code)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print_message(str(ended.code))
        return int(ExitCode.INTERNAL)
    except Exception:  # noqa: BLE001 - the edge of the process
        print_message(traceback.format_exc())
        return int(ExitCode.INTERNAL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
