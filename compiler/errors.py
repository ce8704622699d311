"""Every error a person can cause or act on, as a sentence: what, where, expected, got, what to try.

Each kind is one class, and the class is its row: ``code`` (stable: never renamed or reused), ``title``, the docstring
(what it means) and ``remedy`` (what to do). ``docs/errors.md`` is generated from them. A kind is raised where it fits
best, and caught by any class above it.

Standard library only: every part of adaptc may import this module.
"""

from __future__ import annotations

from collections.abc import Iterator


class AdaptcError(Exception):
    """adaptc found something that no kind below describes better; its message says what."""

    code = "E0001"
    title = "Something adaptc reports to a person"
    remedy = "Do what the message says; if it says nothing of use, report it as a bug."
    exit_code = 2
    """The command line's exit status."""

    def __init__(self, message: str, *, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip() if self.hint else self.message


class NotANumberError(AdaptcError):
    """A step's largest logit is NaN or infinite. No valid weights and tokens give one: a kernel is wrong, a weight is
    damaged, or a cache's dtype is too narrow. -inf: a logit bias leaves no token."""

    code = "E0002"
    title = "The model gave NaN or infinity"
    remedy = "Compare the artifact with the reference (`adaptc verify`), and report the operator that it names."


# ---- E01: the model's files


class InputError(AdaptcError):
    """The model's files, or another file given to adaptc, are damaged, incomplete or contradict each other."""

    code = "E0100"
    title = "Bad input files"
    remedy = "Look at the file and field that the message names; download the files again if they are damaged."


class NotFoundError(InputError):
    """What was given as a model is no file, no directory, and no model that the hub's local copy has."""

    code = "E0101"
    title = "No such model"
    remedy = "Check the path, or download the model first; a hub id is written ORGANISATION/NAME."


class DamagedFileError(InputError):
    """A file ends too early, doesn't start as its format does, or says something that can't be true of it."""

    code = "E0102"
    title = "Damaged or unreadable file"
    remedy = "Download the file again and compare its digest with the publisher's."


class ParseError(InputError):
    """A printed stage isn't MLIR text of the adaptc dialect."""

    code = "E0103"
    title = "IR that doesn't parse"
    remedy = "Look at the marked line; `adaptc inspect MODEL --ir STAGE` prints text that parses."


class UnusedError(InputError):
    """The model's files say something that nothing uses: a key of its configuration or metadata that no code reads, or
    a tensor that is no parameter. A model compiled without it might not be the authors' model."""

    code = "E0104"
    title = "Something in the model's files that nothing uses"
    remedy = ("Correct a misspelt name. Where you know that it doesn't matter, go on with `--waive NAME`; the artifact "
              "records it.")


# ---- E02: what adaptc can't do


class UnsupportedError(AdaptcError):
    """The input is well formed, but adaptc can't handle it; the message lists what it can."""

    code = "E0200"
    title = "Not supported"
    remedy = "Choose one of the alternatives that the message lists, or add what is missing (docs/adding.md)."


class MissingOperatorError(UnsupportedError):
    """The target's backend has no kernel for an operator, and the operator table no decomposition into others."""

    code = "E0201"
    title = "Operators that the target lacks"
    remedy = "Look at the whole list with `adaptc coverage MODEL --target TARGET`; add a kernel or a decomposition."


class PickleError(UnsupportedError):
    """Weights are pickled (.bin, .pt, .pth, .ckpt, .pkl) where safetensors are expected. Unpickling can run any code,
    so adaptc never does it."""

    code = "E0202"
    title = "Pickled weights"
    remedy = "Where you trust the file: load it with transformers' from_pretrained and store it with save_pretrained."


class AdapterError(UnsupportedError):
    """The files hold an adapter (LoRA and the like): changes to another model's weights, and no model."""

    code = "E0203"
    title = "An adapter instead of a model"
    remedy = "Merge it into its base model (peft's merge_and_unload, then save_pretrained), and compile the result."


# ---- E03: options


class OptionError(AdaptcError):
    """An option or argument has a value that makes no sense; the message says which values do."""

    code = "E0300"
    title = "A bad option"
    remedy = "Give a value of the kind that the message asks for; `adaptc COMMAND --help` describes every option."


class UnknownNameError(OptionError):
    """A name (of a target, stage, pass, option, …) is none of the known ones; the message lists those."""

    code = "E0301"
    title = "An unknown name"
    remedy = "Use one of the names listed."


# ---- E04 and E05: capture and IR


class CaptureError(AdaptcError):
    """The authors' module could not be turned into a graph; the message names operator, module and source line."""

    code = "E0400"
    title = "The model can't be captured"
    remedy = "Change what stands at that line, or add a rule for the operator in compiler/capture/aten.py."


class DynamicError(CaptureError):
    """The authors' code decides in Python what is computed, by values or by the number of tokens: a graph holds one
    outcome only."""

    code = "E0401"
    title = "Control flow that can't be captured"
    remedy = "Rewrite that line so that the same operators run for every input (`torch.where`, masks)."


class LocalityError(CaptureError):
    """Outside attention and other operators with state, a token's result depends on other tokens of the step. Served in
    steps, it would depend on how requests are cut into steps and which share one."""

    code = "E0402"
    title = "Code that mixes tokens"
    remedy = "Keep what such code needs of earlier tokens as state, by an operator of its own (docs/adding.md)."


class LegalityError(AdaptcError):
    """An IR module breaks a rule of the stage it claims to be in; the message shows the operator within its function.
    After a pass it is the pass's fault, in a file that of who wrote it."""

    code = "E0500"
    title = "Illegal IR"
    remedy = "Correct the marked operator, or report the pass that the message names."


# ---- E06: artifacts


class ArtifactError(AdaptcError):
    """An artifact can't be loaded: damaged, of a newer format, or built for another machine."""

    code = "E0600"
    title = "An artifact that can't be loaded"
    remedy = "Compile the model again."


class DamageError(ArtifactError):
    """A file of the artifact is missing, added or changed: its size or digest isn't what the manifest says."""

    code = "E0601"
    title = "A damaged artifact"
    remedy = "Copy the artifact again, or compile the model again."


class NewerFormatError(ArtifactError):
    """The artifact was written by an adaptc whose format this one doesn't know."""

    code = "E0602"
    title = "An artifact of a newer format"
    remedy = "Install a newer adaptc, or compile the model again with this one."


class WrongMachineError(ArtifactError):
    """The artifact's kernels use instructions that this machine doesn't have."""

    code = "E0603"
    title = "An artifact for another machine"
    remedy = "Run it where its level is supported, or compile for a level that this machine has (`--level`)."


# ---- E07: requests


class RequestError(AdaptcError):
    """A request to a loaded session can't be served as it is."""

    code = "E0700"
    title = "A request that can't be served"
    remedy = "Change the request as the message says."


class EmptyPromptError(RequestError):
    """A prompt has no tokens: there is nothing to continue."""

    code = "E0701"
    title = "An empty prompt"
    remedy = "Give at least one token."


class TooLongError(RequestError):
    """A request is longer than the artifact's context, or could need more cache pages than there are."""

    code = "E0702"
    title = "A request that is too long"
    remedy = "Shorten it, ask for fewer tokens or samples, load with more cache_bytes, or compile with --max-context."


class VocabularyError(RequestError):
    """A token id is none of the model's."""

    code = "E0703"
    title = "A token outside the vocabulary"
    remedy = "Use ids from the artifact's own tokenizer."


class TemplateError(RequestError):
    """The model's chat template refuses the messages or fails on them; the message has its own words."""

    code = "E0704"
    title = "Messages that the chat template refuses"
    remedy = "Send messages of the roles and shapes that the model was trained with."


# ---- E08: output


class OutputError(AdaptcError):
    """The output can't be written, for example because the disk is full."""

    code = "E0800"
    title = "Output that can't be written"
    remedy = "Make room, or give another place."


class ExistsError(OutputError):
    """Something is there already, and adaptc replaces nothing without being asked to."""

    code = "E0801"
    title = "Output that exists"
    remedy = "Give another name, or --force to replace an artifact."


# ---- E09: installed packages


class PackageError(AdaptcError):
    """An installed package that adds operators, capture rules, kernels, a backend or targets can't be used."""

    code = "E0900"
    title = "A package that adaptc can't use"
    remedy = "Update or uninstall the package that the message names; its authors find the rules in docs/adding.md."


class MissingPackageError(PackageError):
    """An artifact's programs have operators of a package that isn't installed, so that no tool can read them."""

    code = "E0901"
    title = "A package that is missing"
    remedy = "Install the package in the version that the message names. Loading and running need no such package."


def kinds(root: type[AdaptcError] = AdaptcError) -> Iterator[type[AdaptcError]]:
    """Every kind of error, those of installed packages that are imported included, by code."""
    found = {root}
    for kind in root.__subclasses__():
        found |= set(kinds(kind))
    return iter(sorted(found, key=lambda kind: kind.code))


def one_of(kind: str, got: object, valid) -> OptionError:
    """The error for a name that is none of ``valid``: ``unknown target 'x'; valid values are: cpu.``."""
    return UnknownNameError(f"unknown {kind} {got!r}; valid values are: {', '.join(map(str, valid))}.")
