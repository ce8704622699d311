"""Generated pages say what the code says, and pages point at things that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from adaptc.errors import AdaptcError, kinds
from adaptc.ops.table import table
from adaptc.options import CompileOptions
from adaptc.passes.pipeline import pipeline
from fake_codegen import FakeCodegen

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def generator():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = generator().PAGES


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_fresh(name):
    assert (DOCS / name).read_text() == PAGES[name](), f"docs/{name} is stale: run `python docs/generate.py`"


def test_every_kind_of_error_is_a_row():
    rows = [kind for kind in kinds() if kind.__module__ == "adaptc.errors"]
    assert len({kind.code for kind in rows}) == len(rows) > 20
    for kind in rows:
        assert re.fullmatch(r"E\d{4}", kind.code) and kind.exit_code == 2
        for own in ("code", "title", "remedy", "__doc__"):
            assert own in vars(kind) and vars(kind)[own], f"{kind.__name__} has no {own} of its own"
        for base in kind.__mro__[1:]:
            if base is not AdaptcError and issubclass(base, AdaptcError):  # E0601 is a kind of E0600
                assert kind.code[:3] == base.code[:3] and base.code.endswith("00")


STABLE = {
    "E0001": "AdaptcError", "E0002": "NotANumberError", "E0100": "InputError", "E0101": "NotFoundError",
    "E0102": "DamagedFileError", "E0103": "ParseError", "E0104": "UnusedError", "E0200": "UnsupportedError", "E0201": "MissingOperatorError", "E0202": "PickleError", "E0203": "AdapterError",
        "E0300": "OptionError", "E0301": "UnknownNameError", "E0400": "CaptureError", "E0401": "DynamicError", "E0402": "LocalityError", "E0500": "LegalityError",
    "E0600": "ArtifactError", "E0601": "DamageError", "E0602": "NewerFormatError", "E0603": "WrongMachineError",
    "E0700": "RequestError", "E0701": "EmptyPromptError", "E0702": "TooLongError", "E0703": "VocabularyError",
    "E0704": "TemplateError", "E0800": "OutputError", "E0801": "ExistsError",
}
"""Ids that have been published: they stay, and mean what they meant."""


def test_ids_are_stable():
    now = {kind.code: kind.__name__ for kind in kinds()}
    assert {code: now.get(code) for code in STABLE} == STABLE


def test_every_operator_and_pass_is_on_its_page():
    operators, passes = (DOCS / "operators.md").read_text(), (DOCS / "passes.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", passes, re.M) == [
        one.name for _, stage in pipeline(CompileOptions(), FakeCodegen()) for one in stage]
    assert set(re.findall(r"^\| `(\w+)` \|", operators, re.M)) == {
        name for name, row in table().items() if row.meaning.__module__.startswith("adaptc.")}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: p.name)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for name in re.findall(r"`((?:compiler|passes|backends|runtime|models|tests|docs)/[\w./]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
