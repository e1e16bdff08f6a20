"""One linear: weight and lattice in, stored weight and record out. Imports `lattice`, `recipe`."""
