"""The run that checks a checkpoint. As `runs`, which it never imports."""
