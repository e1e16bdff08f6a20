"""Products on a CPU: C++ that is compiled at first use, the layouts it reads, and its calls. Imports `layout`."""
