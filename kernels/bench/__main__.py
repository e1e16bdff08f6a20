"""Run the benchmark: `python -m vllm_latq.kernels.bench`."""

from vllm_latq.kernels.bench.bench import main

if __name__ == "__main__":
    main()
