"""Make Triton's interpreter quicker: it patches its language at every call, which takes longer than most functions."""

from collections.abc import Callable
from typing import Any


def patch_once_per_launch() -> None:
    """Patch each module once per launch: nothing undoes a patch before the launch ends."""
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        if function.__module__ in patched:
            return None  # only the launch itself, which comes first, uses the result
        patched.add(function.__module__)
        return patch(function)

    def patch_and_launch(executor: Any, *arguments: Any, **named: Any) -> None:
        patched.clear()
        launch(executor, *arguments, **named)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, patch_and_launch
