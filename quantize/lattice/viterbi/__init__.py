"""The Viterbi search for rings of the trellis code, on a CPU and on a GPU. Imports `coding`."""
