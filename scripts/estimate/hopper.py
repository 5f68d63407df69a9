"""An H100 SXM in figures, each with its source. None was measured here."""

# NVIDIA's data sheet: 132 multiprocessors, 989.4 TFLOP/s of dense bf16 by wgmma; 4,096 operations a clock each at 1.83 GHz.
MULTIPROCESSORS = 132
PEAK_FLOPS = 989e12
TENSOR_FLOPS_A_CLOCK = 4096
# The clock that a card sustains under load, below the data sheet's boost; an assumption.
CLOCK_HZ = 1.755e9
# CUDA C++ programming guide, compute capability 9.0: four schedulers, one warp instruction a clock each.
SCHEDULERS = 4
# The same: 32 banks of four bytes.
SHARED_BYTES_A_CLOCK = 128
# Luo et al. 2024, "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture": mma.sync comes to 62 % of the peak.
MMA_SHARE = 0.62

# Of the w warps of a scheduler, for how many nothing hides the work beside the bottleneck: see clock.py.
EXPOSED_WARPS = 1.5

# The rate of cuBLASLt's large bf16 products under the power limit of a card, between 640 and 700 in published runs.
PRODUCT_FLOPS, PRODUCT_FLOPS_LOW, PRODUCT_FLOPS_HIGH = 670e12, 640e12, 700e12
# Their rate where power does not limit them, all multiprocessors busy: 8192^3 ran at 769 to 798 on an H200.
UNLIMITED_PRODUCT_FLOPS = 800e12
# What a tile of a product takes beside its operations: its first operands come, and its result goes. An assumption.
TILE_WAIT_S = 1.2e-6
# Of 3.35 TB/s by the data sheet; the same assumption.
BYTES_A_SECOND = 3.0e12
# Latency of a memory load under load; between published 0.5 and 0.8 us.
LATENCY_S = 0.6e-6

# The gap between a kernel's last blocks and the next one's first, when the host is ahead; and within a CUDA graph. Both
# are assumptions: no published figure was found.
GAP_S, GRAPH_GAP_S = 2.5e-6, 1.5e-6
# The host's time for a launch (driver, and cuBLASLt's part); a step is never faster than its launches.
HOST_LAUNCH_S = 5e-6

# The assumed gain of `trainer tune` on products: the middle of 2 to 4 %.
TUNED = 1.03

# cuDNN's attention, forward and ordered backward, causal operations a second by length of sequence. Forward: FlashAttention-3's
# published 550 to 660 for long sequences, less for short ones, whose diagonal is a larger part. Backward: what others measured
# of cuDNN's ordered one, 250 to 380. An H100 with 9.25.1 was slower than that (benches/results/2026-11-27-h100.md), so what estimates say of
# cuDNN is too good.
CUDNN_FLOPS = {1024: (450e12, 250e12), 8192: (600e12, 380e12)}
