"""Imports each module of the package before any other of it, in a process of its own:

    python import_first.py MODULE ...

Prints the modules that fail. Other packages are imported before; transformers does not import this package by itself.
"""

import importlib
import os
import sys
import tempfile

import torch  # noqa: F401
import transformers.models.auto.modeling_auto  # noqa: F401
import wrapt

wrapt.when_imported = lambda name: lambda function: function
with tempfile.TemporaryDirectory() as folder:
    # Whatever the environment says of bytecode: each file is compiled once, not in every process.
    sys.pycache_prefix, sys.dont_write_bytecode = folder, False
    for name in sys.argv[1:]:
        child = os.fork()
        if not child:
            try:
                importlib.import_module(name)
            except BaseException as error:
                print(f"{name}: {error!r}", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
