"""Code that several files of tests share; programs that tests start are in `tests/programs/`."""
