"""The commands of `latq`. Imports everything but `studies` and `dev`."""
