"""Triton's interpreter patches its language at every call of a function, which takes longer than most functions."""

from collections.abc import Callable
from typing import Any


def patch_once_per_launch() -> None:
    """Nothing undoes a patch before the launch ends, so the first one of each module is enough."""
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        if function.__module__ in patched:
            return None  # what only a launch asks for, which is the first
        patched.add(function.__module__)
        return patch(function)

    def launch_anew(executor: Any, *arguments: Any, **named: Any) -> None:
        patched.clear()
        launch(executor, *arguments, **named)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
