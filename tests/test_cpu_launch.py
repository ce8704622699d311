"""The cpu launcher: the object loader on good and hostile files, steps on several threads, a plan run end to end."""

from __future__ import annotations

import dataclasses
import gc
import random
import shutil
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from cpu_kernel import aligned

from adaptc import backends
from adaptc.backends.cpu import launch
from adaptc.backends.cpu.driver_kernel import driver_text
from adaptc.backends.cpu.elf import Image, read_object
from adaptc.backends.cpu.launch import LAUNCHER, Library
from adaptc.backends.cpu.levels import level_of
from adaptc.backends.cpu.toolchain import compile_mlir
from adaptc.errors import ArtifactError, OptionError, PackageError
from adaptc.plan import Buffer, CacheGroup, Call, Kernel, Operator, Plan, Segment, State, StatePart, Symbol

LEVEL = "x86-64-v3"
WIDTH = 64


def mirror(symbol: str, step: int) -> str:
    """out[i] = in[WIDTH*T - 1 - i] + step over i32, each thread its contiguous part: every thread reads what another
    one wrote in the kernel before, so that a barrier that opens early shows."""
    return f"""
llvm.func @{symbol}(%buffers: !llvm.ptr, %symbols: !llvm.ptr, %tid: i64, %n: i64) {{
  %one = arith.constant 1 : i64
  %width = arith.constant {WIDTH} : i64
  %step = arith.constant {step} : i32
  %in = llvm.load %buffers : !llvm.ptr -> !llvm.ptr
  %second = llvm.getelementptr %buffers[%one] : (!llvm.ptr, i64) -> !llvm.ptr, !llvm.ptr
  %out = llvm.load %second : !llvm.ptr -> !llvm.ptr
  %tokens = llvm.load %symbols : !llvm.ptr -> i64
  %size = arith.muli %tokens, %width : i64
  %a = arith.muli %tid, %size : i64
  %low = arith.divui %a, %n : i64
  %next = arith.addi %tid, %one : i64
  %b = arith.muli %next, %size : i64
  %high = arith.divui %b, %n : i64
  %last = arith.subi %size, %one : i64
  scf.for %i = %low to %high step %one : i64 {{
    %j = arith.subi %last, %i : i64
    %from = llvm.getelementptr %in[%j] : (!llvm.ptr, i64) -> !llvm.ptr, i32
    %x = llvm.load %from : !llvm.ptr -> i32
    %y = arith.addi %x, %step : i32
    %to = llvm.getelementptr %out[%i] : (!llvm.ptr, i64) -> !llvm.ptr, i32
    llvm.store %y, %to : i32, !llvm.ptr
  }}
  llvm.return
}}
"""


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    texts = {"driver.o": driver_text("x86_64"), "plus1.o": mirror("plus1", 1), "plus10.o": mirror("plus10", 10)}
    return {name: compile_mlir(text, LEVEL) for name, text in texts.items()}


def plan(**changes) -> Plan:
    """x → plus1 → a → plus10 → b → plus1 → y, with y fed to nothing; operator 1 has two calls and 3 none."""
    signature = ("in:i32[T,64]", "out:i32[T,64]")
    size = 4 * WIDTH * 4
    row = ("T", WIDTH)

    def operator(id: int, *calls: tuple[str, str, str]) -> Operator:
        return Operator(id, "mirror", f"m.{id}", "cpu", tuple(Call(k, (i, o)) for k, i, o in calls), (), {}, {})

    base = Plan(
        target="cpu",
        levels=(LEVEL,),
        backend="cpu",
        vocabulary=WIDTH,
        max_context=8,
        max_step_tokens=4,
        max_requests=2,
        page_size=2,
        key_block=2,
        arena_bytes=2 * size,
        symbols=(Symbol("T", 4), Symbol("R", 2), Symbol("S", 4)),
        buffers=(
            Buffer("x", "input", "i32", row, size),
            Buffer("a", "arena", "i32", row, size, 0),
            Buffer("b", "arena", "i32", row, size, size),
            Buffer("y", "output", "i32", row, size),
            Buffer("w", "weight", "f32", (2, 3), 24, source="model.w"),
            Buffer("packed", "weight", "f32", (2, 3), 10, source="model.packed"),
            Buffer("s", "state", "f32", (), 0, source="layer0"),
            Buffer("t", "pages", "i32", ("R", 4), 32, source="full"),
        ),
        kernels=(Kernel("plus1", "plus1.o", signature), Kernel("plus10", "plus10.o", signature)),
        states=(State("layer0", "rows", "full", "f32", 0, (StatePart("k", 2, 4), StatePart("v", 2, 4))),),
        groups=(CacheGroup("full", 0, ("layer0",), 4),),
        segments=(
            Segment(
                "native",
                (
                    operator(0, ("plus1", "x", "a")),
                    operator(1, ("plus10", "a", "b"), ("plus1", "b", "a")),
                    operator(2, ("plus10", "a", "y")),
                    operator(3),
                ),
            ),
        ),
        inputs={"tokens": "x", "pages:full": "t"},
        outputs={"logits": "y"},
    )
    return dataclasses.replace(base, **changes)


WEIGHTS = {
    "model.w": memoryview(aligned(np.arange(6, dtype=np.float32).reshape(2, 3))),
    "model.packed": memoryview(aligned(np.full(10, 3, np.uint8))),
}
PAGES = {"full": 3}


def load(objects, threads: int = 1, **changes):
    return LAUNCHER.load(plan(**changes), objects, WEIGHTS, threads=threads, pages=PAGES)


# --- a plan, end to end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_a_plan_end_to_end(objects, threads):
    executable = load(objects, threads)
    x = np.arange(4 * WIDTH, dtype=np.int32).reshape(4, WIDTH)
    executable.inputs("tokens")[...] = x
    for tokens in (4, 1, 3):
        symbols = {"T": tokens, "R": 1, "S": 0}
        assert executable.run(symbols) is None
        rows = x[:tokens]
        mirrored = rows.reshape(-1)[::-1].reshape(rows.shape)
        np.testing.assert_array_equal(executable.outputs("logits")[:tokens], rows + 22)
        np.testing.assert_array_equal(executable.read("b", symbols), rows + 11)
        np.testing.assert_array_equal(executable.read("a", symbols), mirrored + 12)
    executable.close()
    executable.close()
    with pytest.raises(OptionError, match="closed"):
        executable.run(symbols)


def test_rows_beyond_the_step_are_not_written(objects):
    executable = load(objects, 2)
    executable.outputs("logits")[...] = -1
    executable.run({"T": 2, "R": 1, "S": 1})
    assert (executable.outputs("logits")[2:] == -1).all() and (executable.outputs("logits")[:2] == 22).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_stop_after_and_times(objects, threads):
    executable = load(objects, threads)
    symbols = {"T": 4, "R": 2, "S": 1}
    executable.outputs("logits")[...] = -1
    assert executable.run(symbols, stop_after=1) is None
    assert (executable.outputs("logits") == -1).all()
    assert (executable.read("a", symbols) == 12).all()
    spent = executable.run(symbols, stop_after=1, times=True)
    assert list(spent) == [0, 1] and all(0 < s < 1 for s in spent.values())
    spent = executable.run(symbols, times=True)
    assert list(spent) == [0, 1, 2, 3] and spent[3] == 0 and spent[2] > 0
    assert (executable.outputs("logits") == 22).all()
    assert executable.run(symbols) is None
    with pytest.raises(OptionError, match="operator 7"):
        executable.run(symbols, stop_after=7)


def test_times_are_seconds(objects):
    """The operators' times add up to most of an untimed step, and never to more than the timed one took."""
    calls = tuple(Call("plus1", ("a", "b")) for _ in range(3000))
    executable = load(objects, segments=(Segment("native", (Operator(0, "m", "", "cpu", calls, (), {}, {}),)),))
    symbols = {"T": 4, "R": 1, "S": 1}
    untimed, sums = [], []
    for _ in range(20):
        start = time.perf_counter()
        executable.run(symbols)
        middle = time.perf_counter()
        sums.append(executable.run(symbols, times=True)[0])
        untimed.append(middle - start)
        assert sums[-1] <= 1.02 * (time.perf_counter() - middle)
    assert min(sums) > 0.5 * min(untimed)


def test_buffers_states_and_weights(objects):
    executable = load(objects)
    symbols = {"T": 1, "R": 1, "S": 1}
    np.testing.assert_array_equal(executable.read("w", symbols), np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(executable.read("packed", symbols), np.full(10, 3, np.uint8))
    assert executable.state("layer0").shape == (3, 2 * 16 * 4) and executable.read("s", symbols).shape == (3, 128)
    assert executable.inputs("pages:full").shape == (2, 4)
    for array in (executable.inputs("tokens"), executable.inputs("pages:full"), executable.state("layer0")):
        assert array.ctypes.data % 64 == 0
    for call, name in ((executable.inputs, "input"), (executable.outputs, "output"), (executable.state, "state")):
        with pytest.raises(OptionError, match=f"unknown {name} 'nope'"):
            call("nope")
    with pytest.raises(OptionError, match="unknown buffer"):
        executable.read("nope", symbols)


@pytest.mark.parametrize("symbols", [{"T": 5, "R": 1, "S": 1}, {"T": 1, "R": -1, "S": 1}, {"T": 1}])
def test_symbols_out_of_range(objects, symbols):
    with pytest.raises(OptionError, match="must be between 0 and"):
        load(objects).run(symbols)


# --- threads ----------------------------------------------------------------------------------------------------------


def chain(length: int) -> dict:
    calls = tuple(Call("plus1", ("x", "a") if i % 2 == 0 else ("a", "x")) for i in range(length))
    return {"segments": (Segment("native", (Operator(0, "mirror", "", "cpu", calls, (), {}, {}),)),)}


@pytest.mark.parametrize("threads, steps", [(2, 10000), (4, 300), (7, 50)])
def test_no_barrier_opens_early(objects, threads, steps):
    """Also with more threads than cores, where progress needs the futex."""
    executable = load(objects, threads, **chain(4))
    for step in range(steps):
        executable.run({"T": 1 + step % 4, "R": 1, "S": 1})
    x = executable.inputs("tokens")
    assert (x[0] == 4 * steps).all()
    assert (x[3] == 4 * (steps // 4)).all()


def test_two_executables_and_two_callers(objects):
    executables = [load(objects, 2, **chain(2)) for _ in range(2)]

    def steps(executable):
        for _ in range(200):
            executable.run({"T": 1, "R": 1, "S": 1})

    callers = [threading.Thread(target=steps, args=(e,)) for e in executables + executables]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((e.inputs("tokens")[0] == 800).all() for e in executables)


def test_a_dropped_executable_ends_its_threads(objects):
    before = threading.active_count()
    executable = load(objects, 3)
    executable.run({"T": 1, "R": 1, "S": 1})
    view = executable.outputs("logits")
    gone = weakref.ref(executable)
    assert threading.active_count() == before + 2
    del executable
    gc.collect()
    assert gone() is None and threading.active_count() == before
    assert (view[0] == 22).all()


def test_launch_needs_no_compiler_and_exit_is_clean(objects, tmp_path):
    """In a process without compiler parts, with workers parked when the interpreter ends."""
    for name, data in objects.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "plan.json").write_text(plan(buffers=tuple(b for b in plan().buffers if b.kind != "weight")).to_json())
    script = """if True:
        import pathlib, sys
        from adaptc.backends import launcher
        from adaptc.plan import Plan
        objects = {p.name: p.read_bytes() for p in pathlib.Path(".").glob("*.o")}
        plan = Plan.from_json(pathlib.Path("plan.json").read_text())
        executable = launcher("cpu").load(plan, objects, {}, threads=3, pages={"full": 1})
        executable.run({"T": 1, "R": 1, "S": 1})
        print(executable.outputs("logits")[0, 0])
        compiler = ("torch", "torch_mlir", "codegen", "toolchain", "driver_kernel")
        loaded = {module for module in sys.modules if set(module.split(".")) & set(compiler)}
        assert not loaded, loaded
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, timeout=20)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, b"22", b"")


def test_close_without_a_step(objects):
    before = threading.active_count()
    load(objects, 4).close()
    assert threading.active_count() == before
    with pytest.raises(OptionError, match="at least 1"):
        load(objects, 0)


# --- plans that don't fit ---------------------------------------------------------------------------------------------


def replaced(handle: str, **changes) -> dict:
    return {"buffers": tuple(dataclasses.replace(b, **changes) if b.handle == handle else b for b in plan().buffers)}


@pytest.mark.parametrize(
    "changes, said",
    [
        (replaced("b", offset=1 << 40), "outside the arena"),
        (replaced("b", offset=-64), "outside the arena"),
        (replaced("b", offset=8), "not aligned"),
        (replaced("x", bytes=64), "needs 1024 bytes, not 64"),
        (replaced("x", dtype="f8"), "dtype 'f8'"),
        (replaced("x", shape=("Q", 64)), "shape"),
        (replaced("x", kind="host"), "kind 'host'"),
        (replaced("w", source="model.v"), "weight 'model.v' is missing"),
        (replaced("w", bytes=100), "has 24 bytes, but the plan needs 100"),
        ({"buffers": plan().buffers[1:]}, "buffer 'x', which the plan doesn't declare"),
        ({"kernels": plan().kernels[1:]}, "'plus1' in a way its kernel isn't declared"),
        ({"arena_bytes": -64}, "arena has -64 bytes"),
        ({"page_size": 0}, "state layer0 has a layout"),
        ({"segments": (Segment("collective", ()),)}, "'collective' segment"),
    ],
)
def test_plans_that_do_not_fit(objects, changes, said):
    with pytest.raises(ArtifactError, match=said):
        load(objects, **changes)


def test_missing_kernel_and_pages(objects):
    with pytest.raises(ArtifactError, match="kernel 'plus10' is in none"):
        load({name: data for name, data in objects.items() if name != "plus10.o"})
    with pytest.raises(ArtifactError, match="'adaptc_"):
        load({name: data for name, data in objects.items() if name != "driver.o"})
    with pytest.raises(OptionError, match="layer0: its cache group 'full'"):
        LAUNCHER.load(plan(), objects, WEIGHTS, threads=1, pages={})
    shifted = {**WEIGHTS, "model.w": memoryview(aligned(np.zeros(32, np.uint8)))[4:28]}
    with pytest.raises(ArtifactError, match="multiple of 64"):
        LAUNCHER.load(plan(), objects, shifted, threads=1, pages=PAGES)


V4 = "x86-64-v4+avx512vnni"


def test_the_best_level_that_the_machine_runs_is_chosen(monkeypatch):
    several = plan(levels=("x86-64-v2", V4, "x86-64-v3", "x86-64-v4", "armv8-a"))
    choose = lambda *names: LAUNCHER.choose_level(plan(levels=names) if names else several)
    machine = lambda *without: frozenset(level_of(V4).flags) - set(without)
    for flags, best in (
        (machine(), V4),
        (machine("avx512_vnni"), "x86-64-v4"),
        (machine("avx512bw", "avx512_vnni"), "x86-64-v3"),
        (machine("avx512bw", "fma"), "x86-64-v2"),
    ):
        monkeypatch.setattr(launch, "host_flags", lambda: flags)
        assert choose() == best
        assert LAUNCHER.choose_level(several, "x86-64-v2") == "x86-64-v2"
    with pytest.raises(OptionError, match="can't run level x86-64-v3: for x86-64-v3 this CPU lacks fma"):
        LAUNCHER.choose_level(several, "x86-64-v3")
    with pytest.raises(OptionError, match="unknown level of this artifact 'x86-64-v4'.*x86-64-v3"):
        LAUNCHER.choose_level(plan(), "x86-64-v4")
    with pytest.raises(ArtifactError, match="x86-64-v3 this CPU lacks fma; for x86-64-v4 this CPU lacks fma, avx512bw"):
        choose("x86-64-v3", "x86-64-v4")
    with pytest.raises(ArtifactError, match="x86-64-v9.*x86-64-v3"):
        choose("x86-64-v9")
    monkeypatch.setattr(launch.platform, "machine", lambda: "aarch64")
    with pytest.raises(ArtifactError, match="x86-64-v3 is for x86_64 CPUs, but this one is aarch64"):
        choose("x86-64-v3")


# --- objects ----------------------------------------------------------------------------------------------------------


def test_library_call(objects):
    library = Library(objects)
    x, y = aligned(np.arange(2 * WIDTH, dtype=np.int32).reshape(2, WIDTH)), aligned(np.zeros((2, WIDTH), np.int32))
    for tid in range(3):
        library.call("plus10", [x, y], [2, 1, 1], tid, 3)
    np.testing.assert_array_equal(y.reshape(-1), x.reshape(-1)[::-1] + 10)
    with pytest.raises(OptionError, match="buffer 1"):
        library.call("plus10", [x, y.T], [2])
    with pytest.raises(ArtifactError, match="'nope'"):
        library.address("nope")


def test_undefined_and_repeated_symbols(objects):
    renamed = objects["driver.o"].replace(b"_GLOBAL_OFFSET_TABLE_", b"_GLOBAL_OFFSET_TABLF_")
    with pytest.raises(ArtifactError, match="_GLOBAL_OFFSET_TABLF_"):
        Image({"driver.o": renamed})
    with pytest.raises(ArtifactError, match="'plus1', which another object defines"):
        Image({"a": objects["plus1.o"], "b": objects["plus1.o"]})


def test_every_truncation_is_refused(objects):
    data = objects["driver.o"]
    for size in range(0, len(data), 7):
        with pytest.raises(ArtifactError, match="driver.o is damaged"):
            read_object(data[:size], "driver.o")


def test_random_damage_never_escapes(objects):
    """Loading damaged objects succeeds or raises ArtifactError: no other exception, no crash, no huge allocation."""
    rng = random.Random(0)
    outcomes = {True: 0, False: 0}
    for _ in range(1500):
        data = bytearray(objects["driver.o"])
        # the structure is at the start and in the second half: the code in between may be anything
        for _ in range(rng.choice((1, 1, 2, 8))):
            region = rng.choice((range(64), range(len(data) // 2, len(data))))
            data[rng.choice(region)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        try:
            Image({"driver.o": bytes(data)})
            outcomes[True] += 1
        except ArtifactError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 50, outcomes


# --- finding backends -------------------------------------------------------------------------------------------------


def test_backends_by_name(monkeypatch):
    assert backends.launcher("cpu") is LAUNCHER
    assert backends.codegen("cpu").name == "cpu"
    for find in (backends.codegen, backends.launcher):
        with pytest.raises(OptionError, match="unknown backend 'tpu'; valid values are: .*cpu"):
            find("tpu")


def test_backends_from_entry_points(monkeypatch, tmp_path):
    package = tmp_path / "vendor_backend"
    package.mkdir()
    (package / "__init__.py").write_text("PROTOCOL = 1")
    (package / "launch.py").write_text("LAUNCHER = 'theirs'")
    info = tmp_path / "vendor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[adaptc.backends]\nvendor = vendor_backend\ncpu = vendor_backend\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert backends.launcher("vendor") == "theirs"
    assert backends.launcher("cpu") is LAUNCHER
    with pytest.raises(OptionError, match="'vendor'"):
        backends.codegen("vendor")
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[adaptc.backends]\nvendor = other_backend\nbroken = other_backend\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert backends.launcher("cpu") is LAUNCHER, "whatever packages bring"
    with pytest.raises(PackageError, match="package vendor 1.0 .*backend 'vendor' is also brought by the package other"):
        backends.launcher("vendor")
    (package / "__init__.py").write_text("PROTOCOL = 99")
    monkeypatch.delitem(sys.modules, "vendor_backend")
    shutil.rmtree(other)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PackageError, match="package vendor 1.0 .*written for protocol 99"):
        backends.launcher("vendor")
