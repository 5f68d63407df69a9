//! Number formats, queues and exchanges between ranks. Operations are judged by `conformance`.

mod bitsandbytes;
mod cuda_map;
mod cuda_queues;
mod exchanges;
mod fp8;
#[cfg(feature = "cuda")]
mod kernel_times;
mod mxfp4;
mod nf4;
mod quantise;
mod queues;
mod random;
