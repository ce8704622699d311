"""MLIR text → relocatable ELF object, without a system compiler, assembler or linker.

The object is the same whatever host compiles it. LLVM takes a function's instruction set from the host unless the
function itself names both its processor and its features, so every function gets both, and so do the argument
packing wrappers (``_mlir_<function>``) that MLIR's ExecutionEngine adds: they are declared beforehand, and the engine
fills in the bodies of the declarations it finds. Nothing calls them, and the object doesn't export them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import tempfile

from adaptc.backends.cpu.elf import hide, read_object
from adaptc.backends.cpu.levels import EXTRAS, LEVELS, Level, level_of
from adaptc.errors import AdaptcError, OptionError

PIPELINE = (
    "inline",  # helpers vanish into the kernels
    "symbol-dce",
    "canonicalize",
    "cse",
    "lower-affine",
    "convert-vector-to-scf{full-unroll=true}",
    "convert-scf-to-cf",
    "expand-strided-metadata",
    "lower-affine",
    "convert-vector-to-llvm{enable-x86=1}",  # sums keep their order: reassociation only where the text asks for it
    "convert-math-to-llvm",
    "convert-ub-to-llvm",
    "finalize-memref-to-llvm",
    "convert-arith-to-llvm",
    "convert-index-to-llvm",
    "convert-cf-to-llvm",
    "convert-func-to-llvm{use-bare-ptr-memref-call-conv=1}",
    "reconcile-unrealized-casts",
    "canonicalize",
    "cse",
)
"""Passes from upstream dialects to the llvm dialect, in order."""

_OPTIMISATION = 3
_REVISION = 1
"""Counts the changes of this file that change objects, other than of the tables."""


def toolchain_version() -> str:
    """What the bytes of an object depend on besides its MLIR text and CPU level's name; part of cache keys."""
    tables = hashlib.sha256(repr((PIPELINE, LEVELS, EXTRAS)).encode()).hexdigest()
    return f"torch-mlir {importlib.metadata.version('torch-mlir')} O{_OPTIMISATION} revision {_REVISION} {tables}"


def check_host(level: Level) -> None:
    """Raises OptionError when the compiling machine can't generate code for ``level``, with the reason."""
    machine = platform.machine()
    if machine != level.machine:
        possible = [name for name, other in LEVELS.items() if other.machine == machine]
        raise OptionError(
            f"kernels for CPU level {level.name} can't be compiled here: torch-mlir brings a code generator for the "
            f"machine it runs on only, which is {machine}, and the level is {level.machine}'s.",
            hint=f"Compile on {level.machine}, or for one of {', '.join(possible)}." if possible else "",
        )


def compile_mlir(text: str, level: str) -> bytes:
    """The object file (ELF, position independent) of the functions in ``text`` for CPU ``level``.

    ``text`` is an MLIR module of ``llvm.func`` or ``func.func`` in upstream dialects. Public functions are exported
    under their names, private ones (``func.func private``) are not. Floating-point arithmetic is carried out as
    written: fused or reordered only where the text says so. Raises AdaptcError with MLIR's diagnostics when the text
    can't be parsed or lowered, and when the code would call a function outside the object.
    """
    from torch_mlir import ir
    from torch_mlir.execution_engine import ExecutionEngine
    from torch_mlir.passmanager import PassManager

    target = level_of(level)
    check_host(target)
    said: list[str] = []

    def listen(diagnostic) -> bool:
        said.append(f"{diagnostic.location}: {diagnostic.message}")
        return True

    with ir.Context() as context, ir.Location.unknown():
        handler = context.attach_diagnostic_handler(listen)
        try:
            module = ir.Module.parse(text)
            PassManager.parse(f"builtin.module({','.join(PIPELINE)})").run(module.operation)
            kernels = _target_functions(module, target)
            module.operation.verify()
            engine = ExecutionEngine(module, opt_level=_OPTIMISATION, enable_object_dump=True, enable_pic=True)
            data = hide(_dump(engine), kernels)
        except (ir.MLIRError, RuntimeError, ValueError) as error:
            reason = "\n".join([*said, str(error)]).strip()
            raise AdaptcError(
                f"a kernel could not be compiled for {level}: {reason}\n{_excerpt(text, reason)}"
            ) from error
        finally:
            handler.detach()
    undefined = read_object(data, "the compiled object").undefined()
    if undefined:
        raise AdaptcError(
            f"a kernel calls {', '.join(undefined)}, but kernels are loaded without any library.",
            hint="Write it as arithmetic in the kernel's text.",
        )
    return data


def _target_functions(module, level: Level) -> frozenset[str]:
    """Gives every function of ``module`` (llvm dialect) and the engine's future wrapper of it the level's target.

    Returns the names of the public functions."""
    from torch_mlir import ir

    features = ", ".join(f'"{feature}"' for feature in level.target_features)
    target = {
        "target_cpu": ir.StringAttr.get(level.target_cpu),
        "target_features": ir.Attribute.parse(f"#llvm.target_features<[{features}]>"),
    }
    functions, public = [], set()
    for operation in list(module.body.operations):
        if operation.operation.name != "llvm.func":
            continue
        attributes = operation.operation.attributes
        name = ir.StringAttr(attributes["sym_name"]).value
        if len(operation.regions[0].blocks) == 0:
            if name.startswith("llvm."):  # an intrinsic
                continue
            raise ValueError(f"function {name!r} has no body, and kernels are loaded without any library.")
        # no-builtins: loops over rows stay loops, they don't become calls of memcpy and memset
        passthrough = [*attributes["passthrough"]] if "passthrough" in attributes else []
        passthrough += [ir.StringAttr.get("no-builtins"), ir.StringAttr.get("nounwind")]
        if "sym_visibility" not in attributes:
            public.add(name)
            attributes["no_inline"] = ir.UnitAttr.get()  # a wrapper must not hold a second copy of the kernel
        for key, value in target.items():
            attributes[key] = value
        attributes["passthrough"] = ir.ArrayAttr.get(passthrough)
        functions.append(name)
    with ir.InsertionPoint(module.body):
        for name in functions:
            _declare_wrapper(name, target)
    return frozenset(public)


def _declare_wrapper(name: str, target: dict) -> None:
    from torch_mlir import ir

    ir.Operation.create(
        "llvm.func",
        regions=1,
        attributes={
            "sym_name": ir.StringAttr.get(f"_mlir_{name}"),
            "function_type": ir.TypeAttr.get(ir.Type.parse("!llvm.func<void (ptr)>")),
            "linkage": ir.Attribute.parse("#llvm.linkage<external>"),
            "CConv": ir.Attribute.parse("#llvm.cconv<ccc>"),
            **target,
        },
    )


def _dump(engine) -> bytes:
    with tempfile.TemporaryDirectory(prefix="adaptc-") as folder:
        path = os.path.join(folder, "kernel.o")
        engine.dump_to_object_file(path)
        if not os.path.exists(path):
            raise RuntimeError("LLVM could not generate code (its message is on standard error)")
        with open(path, "rb") as file:
            return file.read()


def _excerpt(text: str, reason: str, around: int = 3) -> str:
    """The lines of ``text`` around the first place that ``reason`` names (MLIR writes ``"-":line:column``)."""
    place = re.search(r'"-":(\d+):', reason)
    if not place:
        return ""
    line = int(place[1])
    numbered = list(enumerate(text.splitlines(), 1))
    return "\n".join(f"{number:5} | {row}" for number, row in numbered[max(0, line - 1 - around) : line + around])
