//! Stand-ins that tests of several crates use, kept out of the libraries that they stand in for.
//!
//! [`scheduled::Scheduled`] is a device whose queues run in any order that their events allow. [`PowerCut`] and [`FullDisk`] are file systems that stop at a chosen operation or byte, [`Faults`] makes a chosen read or
//! write of a scratch file fail, and [`Threads`] makes ranks of threads:
//!
//! ```
//! use collectives::{Incoming, Outgoing};
//! use fakes::Threads;
//!
//! let ranks = Threads::group(2);
//! std::thread::scope(|scope| {
//!     for group in &ranks {
//!         scope.spawn(|| {
//!             let other = 1 - group.rank();
//!             let (here, mut there) = ([group.rank() as u8; 4], [9; 4]);
//!             let sends = [Outgoing { to: other, pointer: here.as_ptr(), bytes: here.len() }];
//!             let receives = [Incoming { from: other, pointer: there.as_mut_ptr(), bytes: there.len() }];
//!             // SAFETY: both arrays live on, and nothing else touches them.
//!             unsafe { group.exchange(&sends, &receives) }.unwrap();
//!             assert_eq!(there, [other as u8; 4]);
//!             assert_eq!(group.sent_bytes(), 4);
//!         });
//!     }
//! });
//! ```

mod faulty_files;
mod full_disk;
mod hazards;
mod power_cut;
pub mod scheduled;
mod threads;

pub use faulty_files::{DiskFault, Faults};
pub use full_disk::FullDisk;
pub use power_cut::{Kept, PowerCut};
pub use threads::Threads;
