"""What a model reference means: `file.py:factory`, `package.module:factory`, `zoo:NAME`, `hf:MODEL_TYPE`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError, UsageError
from autopar.models import hf, zoo
from autopar.models.settings import parse_setting
from autopar.models.shallow import Shallow, ShorterModels
from autopar.suggest import did_you_mean

_FORMS = "path/to/file.py:factory, package.module:factory, zoo:NAME, or hf:MODEL_TYPE"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model and one example batch."""

    name: str
    model: nn.Module
    example_inputs: tuple[Any, ...] | dict[str, Any] | None
    """Of the global batch; `None` where the factory gave a model alone."""

    tokens_per_step: int | None
    """Tokens of the global batch, where the model reads tokens."""

    shallow: Iterable[Shallow] = ()
    """Models with few layers, each made when it is asked for, of which the first that can stands for this one."""


def resolve(
    reference: str, *, batch: int | None = None, seq: int | None = None, overrides: Mapping[str, str] | None = None
) -> ModelRef:
    """Return the model that a reference names, with example inputs of the global batch `batch` and length `seq`.

    Models of the zoo and of transformers are on meta. A factory of the user's gets `batch`, `seq` and the overrides as
    keyword arguments where it has parameters of these names (overrides as the type of the annotation or the default,
    as text where there is neither).

    Raises:
        UsageError: the reference names nothing, or what it names gives no model.
    """
    head, colon, tail = reference.rpartition(":")
    if reference.startswith(("zoo:", "hf:")):
        head, _, tail = reference.partition(":")
    if not colon or not head or not tail:
        raise UsageError(f"model reference {reference!r} is not of the form {_FORMS}")
    settings = dict(overrides or {})
    for name, value in (("--batch", batch), ("--seq", seq)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value} is no positive number")
    if head == "zoo":
        model, inputs, tokens = zoo.build(tail, batch=batch, seq=seq, overrides=settings)
        return ModelRef(reference, model, inputs, tokens, zoo.shorter_models(model, inputs, tail, settings))
    if head == "hf":
        return _hf(reference, tail, batch, seq, settings)
    return _factory(reference, head, tail, {"batch": batch, "seq": seq}, settings)


def _hf(reference: str, source: str, batch: int | None, seq: int | None, overrides: Mapping[str, str]) -> ModelRef:
    config = hf.load_config(source, overrides)
    try:
        model = hf.build(config)
    except AutoparError:
        raise
    except Exception as error:
        raise UsageError(
            f"transformers cannot build {reference} from this configuration: {_one_line(error)}; look at the --set "
            "values"
        ) from error
    specs = hf.inputs(model, batch, seq)
    inputs: dict[str, Any] = {name: spec.meta() for name, spec in specs.items()}
    ids = specs.get("input_ids")
    inputs |= hf.plain_arguments(model)
    return ModelRef(
        reference,
        model,
        inputs,
        ids.shape[0] * ids.shape[1] if ids is not None else None,
        ShorterModels(model, inputs, config, hf.build),
    )


def _is_offered(name: str, found: Any) -> bool:
    """Return whether a module's `name` may be what a mistyped factory meant."""
    return not name.startswith("_") and callable(found)


def _factory(
    reference: str, place: str, attribute: str, sizes: Mapping[str, int | None], overrides: Mapping[str, str]
) -> ModelRef:
    is_file = place.endswith(".py")
    module = _load_file(reference, Path(place)) if is_file else _load_module(reference, place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            has_names = hasattr(found, "__dict__")
            public = [name for name, each in vars(found).items() if _is_offered(name, each)] if has_names else []
            raise UsageError(f"{place} has no {part!r}{did_you_mean(part, public)} (reference {reference!r})")
        found = getattr(found, part)
    made = found if isinstance(found, nn.Module) else _call(reference, found, sizes, overrides)
    model, inputs = _parts(reference, made)
    return ModelRef(reference, model, inputs, _tokens(inputs))


def _load_file(reference: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"model file {path} does not exist (reference {reference!r}, from {Path.cwd()})")
    name = re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(f"autopar_user_{name}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles of the user's look their module up by name.
    sys.modules[spec.name] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _raised(f"{path} cannot be imported", error, str(path)) from error
    finally:
        sys.path.remove(folder)
    return module


def _load_module(reference: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"no module named {error.name!r} (reference {reference!r}); a model reference is {_FORMS}"
            ) from None
        raise _raised(f"module {name} cannot be imported", error, name) from error
    except Exception as error:
        raise _raised(f"module {name} cannot be imported", error, name) from error
    finally:
        sys.path.remove(here)


def _call(reference: str, factory: Any, sizes: Mapping[str, int | None], overrides: Mapping[str, str]) -> Any:
    if not callable(factory):
        raise UsageError(
            f"{reference} is of type {type(factory).__name__}, and must be a function that returns (model, inputs)"
        )
    try:
        parameters = dict(inspect.signature(factory).parameters)
    except ValueError:
        parameters = {}
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    unknown = [key for key in overrides if key not in parameters and not takes_any]
    if unknown:
        raise UsageError(
            f"--set {unknown[0]}: {reference} takes no {unknown[0]!r}{did_you_mean(unknown[0], parameters)}"
        )
    given: dict[str, Any] = {
        name: size for name, size in sizes.items() if size is not None and (name in parameters or takes_any)
    }
    settings = {key: _as_declared(key, text, parameters.get(key)) for key, text in overrides.items()}
    try:
        return factory(**given, **settings)
    except Exception as error:
        raise _raised(f"{reference} raised", error, inspect.getsourcefile(factory) or "") from error


_SAMPLES: dict[object, object] = {int: 0, "int": 0, float: 0.0, "float": 0.0, bool: False, "bool": False}
"""A value of each type that an annotation may name."""


def _as_declared(key: str, text: str, parameter: inspect.Parameter | None) -> Any:
    """Return a setting as the type that a factory's parameter is annotated with, else of its default; else as text.

    Raises:
        UsageError: the text is no value of that type.
    """
    if parameter is None or parameter.annotation in (str, "str"):
        return text
    if parameter.annotation in _SAMPLES:
        return parse_setting(key, text, _SAMPLES[parameter.annotation])
    declared = parameter.default
    return text if declared is inspect.Parameter.empty or declared is None else parse_setting(key, text, declared)


def _what(made: Any) -> str:
    """Return what a factory gave instead of a model, in the user's words."""
    if isinstance(made, type):
        return f"the class {made.__name__} instead of an instance"
    if not isinstance(made, tuple | list):
        return f"a value of type {type(made).__name__}"
    said = f"a {type(made).__name__} of {len(made)}"
    return f"{said}, whose first is {_what(made[0])}" if len(made) == 2 else said


def _parts(reference: str, made: Any) -> tuple[nn.Module, tuple[Any, ...] | dict[str, Any] | None]:
    if isinstance(made, nn.Module):
        return made, None
    if not (isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(f"{reference} returned {_what(made)}, and must return a model or (model, example_inputs)")
    model, inputs = made
    if isinstance(inputs, torch.Tensor):
        return model, (inputs,)
    if isinstance(inputs, Mapping):
        return model, dict(inputs)
    if isinstance(inputs, tuple | list):
        return model, tuple(inputs)
    raise UsageError(
        f"{reference} returned example inputs of type {type(inputs).__name__}, and must be a tuple (positional) or "
        "a dict (keyword)"
    )


def _tokens(inputs: tuple[Any, ...] | dict[str, Any] | None) -> int | None:
    """Return the elements of the first input if it is two-dimensional and of integers, as token ids are."""
    values = list(inputs.values()) if isinstance(inputs, dict) else list(inputs or ())
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    if tensors and tensors[0].dim() == 2 and not tensors[0].is_floating_point():
        return tensors[0].numel()
    return None


def _raised(what: str, error: Exception, file: str) -> UsageError:
    """Return the error for user code that raised: what it raised, and the last of the user's lines on the way."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if file and Path(each.filename).name == Path(file).name]
    outside = [each for each in frames if not each.filename.startswith(str(Path(__file__).parent))]
    last = next(reversed(own or outside), None)
    where = f"\n  at {last.filename}:{last.lineno}: {last.line}" if last is not None else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f"\n  at {error.filename}:{error.lineno}: {(error.text or '').strip()}"
    return UsageError(f"{what}: {_one_line(error)}{where}")


def _one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
