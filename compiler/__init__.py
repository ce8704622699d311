"""adaptc: a model as its authors publish it in, a deployable artifact for an accelerator out.

    import adaptc
    adaptc.compile("SmolLM2-135M-Instruct.Q4_1.gguf", "cpu", output="smol.adapt")
    print(adaptc.load("smol.adapt").generate("Hello", max_tokens=16).text)
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["compile", "load", "__version__"]


def compile(model, target: str = "cpu", **options):  # noqa: A001 - the public name
    """Compiles ``model`` for ``target``; see ``adaptc.driver.compile_model`` for the options."""
    from adaptc.driver import compile_model

    return compile_model(model, target, **options)


def load(path, threads: int | None = None, cache_bytes: int | None = None, level: str | None = None, **options):
    """Loads an artifact and returns a ``Session``; see ``adaptc.runtime.session.load`` for further options."""
    from adaptc.runtime.session import load as load_session

    return load_session(path, threads=threads, cache_bytes=cache_bytes, level=level, **options)
