"""Writes docs/reference.md from the docstrings: `python scripts/make_reference.py [--check]`.

Every name of `sparkdml.__all__` and of `sparkdml.extending.__all__`, with its signature, its
docstring, its public methods, and for classes with Spark ML Params a table of them. To change it,
change the docstrings.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
EVENTS_PAGE = ROOT / "docs" / "reference-events.md"

HEAD = """# Reference

Made from the docstrings by `python scripts/make_reference.py`; change it there. The events of a run
have [a page of their own](reference-events.md).
"""

# In the order in which a reader meets them; a public name that fits nowhere is an error.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Estimators and models": (
        "Estimator",
        "Classifier",
        "Regressor",
        "Model",
        "transform_with",
        "OnlineTrainer",
    ),
    "Running functions": ("run", "Context", "Dataset", "Batch", "Ragged", "pad", "session_builder"),
    "Strategies": (
        "AllReduce",
        "LocalSGD",
        "BlockMomentum",
        "SlowMo",
        "EASGD",
        "LayeredSGD",
        "AdaptiveBalance",
        "BackupWorkers",
        "Gossip",
        "ADPSGD",
        "Hogwild",
        "LBFGS",
        "NewtonCG",
        "Averaging",
        "ParameterServer",
        "Downpour",
        "Hybrid",
        "Strategy",
    ),
    "Compression": ("FP16", "BF16", "OneBit", "TopK", "PowerSGD"),
    "Consistency": ("BSP", "SSP", "ASP", "TAP", "Expulsion"),
    "Comparing strategies": ("compare", "advise"),
    "Tables and programs": (
        "KVStore",
        "WithStore",
        "ServerGroup",
        "ArrayTable",
        "MatrixTable",
        "SparseTable",
        "Program",
        "run_program",
        "multiply",
    ),
    "Callbacks": (
        "Callback",
        "EarlyStopping",
        "LearningRateSchedule",
        "BestModel",
        "TimeLimit",
        "GradientMonitor",
        "EMA",
    ),
    "Checkpoints": ("Checkpoints", "Keep", "CheckpointStore"),
    "Watching": ("History", "MLflow", "TensorBoard", "mlflow"),
    "Extending": (
        "Compression",
        "Reducer",
        "ResidualReducer",
        "Bucket",
        "FlatParams",
        "Unfinished",
        "begin_stats",
        "Communicator",
        "Work",
        "Entry",
        "State",
        "TrainingRun",
        "StepStrategy",
        "Training",
        "TrainingPlan",
        "Epoch",
        "Task",
        "Totals",
        "VOTES",
        "Role",
        "Resources",
        "DriverService",
        "TaskIdentity",
        "Tracker",
        "TrackerSettings",
        "ReceivesOutcome",
        "check_name",
    ),
    "Saving": ("allow_packages", "allow_pickle", "factory"),
    "Errors": ("Error", "Lost", "NonFiniteLoss", "NotEnoughSlots"),
}
# What stands under a section's heading.
NOTES = {
    "Extending": "These are names of `sparkdml.extending`: what a compressor, a callback, a "
    "strategy, a store or a\ntracker of your own is written with. "
    "[How to extend](how-to-extend.md) says where to begin."
}
# Users are given these, and never make one.
GIVEN = {
    "Context",
    "History",
    "TorchModel",
    "Batch",
    "Ragged",
    "Bucket",
    "FlatParams",
    "Communicator",
    "Work",
    "Training",
    "TrainingRun",
    "TrainingPlan",
    "Epoch",
    "Task",
    "TaskIdentity",
    "Totals",
}
# Names that are neither classes nor functions have no docstring.
VALUES = {
    "State": "`dict[str, Entry]`, by names of your choice.",
    "VOTES": "Where in a vector of stats the votes are: wishes, objections, stops.",
}
# Called by the package only.
OURS = {"close_feed", "close", "event", "flush_events", "label_column", "feature_columns"}
ENDINGS = ("Estimator", "Classifier", "Regressor", "Model", "Error", "Lost")


def section_of(name: str) -> str:
    for section, names in SECTIONS.items():
        if name in names:
            return section
    for section, names in SECTIONS.items():
        if any(name.endswith(ending) for ending in names if ending in ENDINGS):
            return section
    raise SystemExit(f"{name} has no section: add it to SECTIONS in {Path(__file__).name}")


def signature_of(name: str, value: Any) -> str:
    """The call as a user writes it; long ones are folded, one argument a line."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    shown = [show_parameter(p) for p in parameters]
    first_keyword = next((i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    has_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if first_keyword is not None and not has_rest:
        shown.insert(first_keyword, "*")
    returns = ""
    if not inspect.isclass(value) and signature.return_annotation is not inspect.Signature.empty:
        returns = f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(shown)}){returns}"
    if len(line) <= 96:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){returns}"


def show_parameter(parameter: inspect.Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {parameter.annotation}"
    if parameter.default is not parameter.empty:
        equals = " = " if ":" in text else "="
        text += f"{equals}{show_value(parameter.default)}"
    return text


def show_value(value: object) -> str:
    text = repr(value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def describe_doc(doc: str | None) -> str:
    """A docstring as Markdown: `Args:` and its kin become lists, doctests become code."""
    lines: list[str] = []
    in_list = in_code = False
    for line in inspect.cleandoc(doc or "").splitlines():
        if line.startswith(">>>") and not in_code:
            lines.append("```text")
            in_code = True
        if in_code and not line.strip():
            lines.append("```")
            in_code = False
        if in_code:
            lines.append(line)
        elif line.rstrip() in ("Args:", "Raises:", "Returns:", "Attributes:"):
            lines += [f"**{line.strip().rstrip(':')}**", ""]
            in_list = True
        elif in_list and re.match(r" {4}(?! )\*{0,2}[\w, ]+: ", line):
            name, _, what = line.strip().partition(": ")
            lines.append(f"- `{name}`: {what}")
        elif in_list and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            in_list = in_list and not line.strip()
            lines.append(line)
    if in_code:
        lines.append("```")
    return "\n".join(lines).strip()


def params_of(cls: type) -> list[Any]:
    from pyspark.ml.param import Param, Params

    if not issubclass(cls, Params):
        return []
    named = {n: getattr(cls, n) for n in dir(cls) if isinstance(getattr(cls, n, None), Param)}
    order = list(inspect.signature(cls).parameters)
    rank = {name: place for place, name in enumerate(order)}
    return sorted(named.values(), key=lambda p: (rank.get(p.name, len(rank)), p.name))


def params_table(cls: type) -> Iterator[str]:
    params = params_of(cls)
    if not params:
        return
    parameters = inspect.signature(cls).parameters
    yield "| Param | default | |"
    yield "|---|---|---|"
    for param in params:
        default: object = None if param.make_default is None else param.make_default()
        if default is None and param.name in parameters:
            default = parameters[param.name].default
        text = "" if default is None or default is inspect.Parameter.empty else show_value(default)
        text = f"`{text}`" if text else ""
        doc = " ".join(param.doc.split()).replace("|", "\\|")
        yield f"| `{param.name}` | {text} | {doc} |"
    yield ""


def methods_of(cls: type, public: set[type]) -> Iterator[tuple[str, Any]]:
    """Methods and properties with a docstring of their own, but for those of a public base."""
    titles = [f"{param.name[0].upper()}{param.name[1:]}" for param in params_of(cls)]
    accessors = {f"{verb}{title}" for title in titles for verb in ("set", "get")}
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("sparkdml") or (base in public and base is not cls):
            continue
        for name, value in vars(base).items():
            plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            is_method = inspect.isfunction(plain) or isinstance(plain, property)
            if is_method and plain.__doc__ and not name.startswith("_"):
                found[name] = plain
    yield from ((name, found[name]) for name in found if name not in accessors | OURS)


def describe_class(name: str, cls: type, public: set[type]) -> Iterator[str]:
    is_given = name in GIVEN or issubclass(cls, Exception) or getattr(cls, "_is_protocol", False)
    if not params_of(cls) and not is_given:
        yield from ("```text", signature_of(name, cls), "```", "")
    yield from (describe_doc(cls.__doc__), "")
    yield from params_table(cls)
    # Users hand a strategy over, and don't call it: who writes one of his own reads of Strategy.
    is_handed_over = section_of(name) in ("Strategies", "Compression") and name != "Strategy"
    for method, value in () if is_handed_over else methods_of(cls, public):
        if isinstance(value, property):
            yield f"`.{method}`: {first_paragraph(value.__doc__)}"
        else:
            call = " ".join(signature_of(f".{method}", value).split()).replace(", )", ")")
            yield f"`{call.replace('( ', '(')}`: {first_paragraph(value.__doc__)}"
        yield ""


def first_paragraph(doc: str | None) -> str:
    return " ".join(inspect.cleandoc(doc or "").split("\n\n")[0].split())


def describe(name: str, value: Any, public: set[type]) -> Iterator[str]:
    yield from (f"### {name}", "")
    if inspect.isclass(value) and name not in VALUES:
        yield from describe_class(name, value, public)
    elif inspect.ismodule(value):
        yield from (describe_doc(value.__doc__), "")
        for inner in getattr(value, "__all__", ()):
            yield from (
                "```text",
                signature_of(f"{name}.{inner}", getattr(value, inner)),
                "```",
                "",
            )
            yield from (describe_doc(getattr(value, inner).__doc__), "")
    elif name in VALUES:
        yield from (VALUES[name], "")
    else:
        yield from (
            "```text",
            signature_of(name, value),
            "```",
            "",
            describe_doc(value.__doc__),
            "",
        )


def make_reference() -> str:
    import sparkdml
    from sparkdml import extending

    values = {name: getattr(extending, name) for name in extending.__all__}
    values |= {name: getattr(sparkdml, name) for name in sparkdml.__all__ if name[0] != "_"}
    public = {value for value in values.values() if inspect.isclass(value)}
    by_section: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for name in values:
        by_section[section_of(name)].append(name)
    lines = [HEAD]
    for section, members in by_section.items():
        if not members:
            continue
        order = {each: place for place, each in enumerate(SECTIONS[section])}
        lines += [f"## {section}", ""]
        lines += [NOTES[section], ""] if section in NOTES else []
        for name in sorted(members, key=lambda each: (order.get(each, len(order)), each)):
            lines += describe(name, values[name], public)
    text = "\n".join(lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def make_events_page() -> str:
    """The page as it is, with the table of sparkdml/observe/events.py."""
    from sparkdml.observe.events import as_markdown

    table = re.compile(r"^\| kind \|.*?\n(?!\|)", re.MULTILINE | re.DOTALL)
    return table.sub(lambda _: as_markdown(), EVENTS_PAGE.read_text(), count=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="1 if a page is not current")
    options = parser.parse_args()
    status = 0
    for page, make in ((PAGE, make_reference), (EVENTS_PAGE, make_events_page)):
        if not options.check:
            page.write_text(make())
        elif not page.exists() or page.read_text() != make():
            print(f"{page.relative_to(ROOT)} is not current: python {Path(__file__).name}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
