//! Ranks share bytes over TCP where there is no MPI. All messages go through rank 0, which listens at an address that
//! all ranks know.

use crate::{GroupError, Patience, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Pause between two attempts to reach a rank that is not there yet.
const SLEEP: Duration = Duration::from_millis(5);

/// How long a caller may take to greet. Programs that are no ranks may find the port too, and must not block it.
const GREETING: Duration = Duration::from_secs(2);

/// How much longer the others wait than rank 0, which knows which ranks are late and tells them.
const SLACK: Duration = Duration::from_secs(5);

/// How a rank begins its greeting; its number and the number of ranks follow.
const RANK: [u8; 8] = *b"trainer?";

/// Rank 0's answer to a greeting.
const WELCOME: [u8; 8] = *b"trainer!";

/// Sent instead of a message's length if a rank failed: the reason follows, after its own length.
const FAILED: u64 = u64::MAX;

/// Longer than any message: a larger length does not come from a rank.
const MOST_BYTES: u64 = 1 << 30;

/// One rank's connections: rank 0 has one to each of the others, in their order, and each of these one to rank 0.
pub(crate) struct Sockets {
    rank: usize,
    size: usize,
    patience: Patience,
    /// Locked during a share: one goes on at a time.
    streams: Mutex<Vec<TcpStream>>,
}

impl Sockets {
    /// Meets the other ranks at `host:port`.
    pub(crate) fn meet(
        place: &str,
        [rank, size]: [usize; 2],
        patience: Patience,
    ) -> Result<Sockets> {
        let deadline = Instant::now() + patience.timeout();
        let streams = match (rank, size) {
            (_, 1) => Vec::new(),
            (0, _) => answer(place, size, deadline, &patience)?,
            _ => vec![call(place, [rank, size], deadline, &patience)?],
        };
        Ok(Sockets {
            rank,
            size,
            patience,
            streams: Mutex::new(streams),
        })
    }

    /// The bytes of all ranks, in their order.
    pub(crate) fn share(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        match self.rank {
            0 => self.collect(&mut streams, bytes),
            _ => self.tell(&mut streams[0], bytes),
        }
    }

    /// Rank 0: receives the bytes of every rank, and sends all of them to every rank.
    fn collect(&self, streams: &mut [TcpStream], bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + self.patience.timeout();
        let mut all = vec![bytes.to_vec()];
        for (index, stream) in streams.iter_mut().enumerate() {
            match receive(stream, deadline) {
                Ok(Ok(bytes)) => all.push(bytes),
                Ok(Err(reason)) => return Err(GroupError::Failed(reason)),
                Err(error) => {
                    let error = self.failed(index + 1, &error);
                    let reason = error.to_string();
                    for stream in streams {
                        // A rank that does not get the message notices that this one is gone; ignore the error.
                        let _ = send(stream, FAILED, reason.as_bytes(), Instant::now() + GREETING);
                    }
                    return Err(error);
                }
            }
        }
        for (index, stream) in streams.iter_mut().enumerate() {
            for bytes in &all {
                send(stream, bytes.len() as u64, bytes, deadline)
                    .map_err(|error| self.failed(index + 1, &error))?;
            }
        }
        Ok(all)
    }

    /// Another rank: sends its bytes to rank 0, and receives those of all ranks.
    fn tell(&self, stream: &mut TcpStream, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + self.patience.timeout() + SLACK;
        let failed = |error: std::io::Error| self.failed(0, &error);
        send(stream, bytes.len() as u64, bytes, deadline).map_err(failed)?;
        let hear = |_| {
            receive(stream, deadline)
                .map_err(failed)?
                .map_err(GroupError::Failed)
        };
        (0..self.size).map(hear).collect()
    }

    fn failed(&self, peer: usize, error: &std::io::Error) -> GroupError {
        match error.kind() {
            ErrorKind::TimedOut => self.patience.late(self.rank, "a share", [peer]),
            _ => GroupError::Failed(format!(
                "rank {} has gone, while rank {} waited for it ({error})",
                self.patience.name(peer),
                self.patience.name(self.rank)
            )),
        }
    }
}

/// Rank 0: listens until all others have come.
fn answer(
    place: &str,
    size: usize,
    deadline: Instant,
    patience: &Patience,
) -> Result<Vec<TcpStream>> {
    let port = place
        .rsplit_once(':')
        .and_then(|(_, port)| port.parse().ok());
    let port = port.ok_or_else(|| no_place(place))?;
    let listener = listen(port, deadline).map_err(|error| {
        GroupError::Failed(format!(
            "rank 0 cannot listen on port {port}, where ranks meet: {error}; choose another by MASTER_PORT (ranks meet on the \
             one after it) or NCCL_COMM_ID=HOST:PORT"
        ))
    })?;
    let mut streams: Vec<Option<TcpStream>> = (1..size).map(|_| None).collect();
    while streams.iter().any(Option::is_none) {
        let Ok((mut stream, _)) = listener.accept() else {
            if Instant::now() > deadline {
                let missing = (1..size).filter(|rank| streams[rank - 1].is_none());
                return Err(patience.late(0, "the meeting of ranks", missing));
            }
            std::thread::sleep(SLEEP);
            continue;
        };
        // A caller with another greeting is no rank of this job; ignore it.
        let Ok([rank, its_size]) = greeted(&mut stream) else {
            continue;
        };
        let place = rank.checked_sub(1).and_then(|index| streams.get_mut(index));
        match place {
            Some(place @ None) if its_size == size => *place = Some(stream),
            _ => {
                return Err(GroupError::Launch(format!(
                    "rank {rank} of {its_size} came to the meeting of {size} ranks, which has it already or has no such rank: \
                     two jobs have the same MASTER_ADDR and MASTER_PORT, or ranks were started twice"
                )));
            }
        }
    }
    Ok(streams.into_iter().flatten().collect())
}

/// Listens on all addresses of this machine. A port that is taken is tried again, since an earlier job or a closing connection
/// may free it soon.
fn listen(port: u16, deadline: Instant) -> std::io::Result<TcpListener> {
    loop {
        let bound = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)));
        match bound {
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                std::thread::sleep(SLEEP);
            }
            bound => {
                let listener = bound?;
                listener.set_nonblocking(true)?;
                return Ok(listener);
            }
        }
    }
}

/// Reads a caller's greeting and answers it: the caller's rank, and its number of ranks.
fn greeted(stream: &mut TcpStream) -> std::io::Result<[usize; 2]> {
    let deadline = Instant::now() + GREETING;
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    let mut greeting = [0; 24];
    read(stream, &mut greeting, deadline)?;
    let [magic, rank, size] = [0, 8, 16].map(|at| &greeting[at..at + 8]);
    if *magic != RANK {
        return Err(ErrorKind::InvalidData.into());
    }
    write(stream, &WELCOME, deadline)?;
    let number =
        |bytes: &[u8]| u64::from_le_bytes(*bytes.as_array().expect("eight bytes")) as usize;
    Ok([number(rank), number(size)])
}

/// Another rank: calls until rank 0 answers.
fn call(
    place: &str,
    [rank, size]: [usize; 2],
    deadline: Instant,
    patience: &Patience,
) -> Result<TcpStream> {
    let greeting = [
        RANK,
        (rank as u64).to_le_bytes(),
        (size as u64).to_le_bytes(),
    ]
    .concat();
    let greet = || {
        let addresses = place.to_socket_addrs()?;
        let mut stream = Err(ErrorKind::AddrNotAvailable.into());
        for address in addresses {
            stream = TcpStream::connect_timeout(&address, left(deadline)?);
            if stream.is_ok() {
                break;
            }
        }
        let mut stream = stream?;
        stream.set_nodelay(true)?;
        write(&mut stream, &greeting, deadline)?;
        let mut answer = [0; 8];
        read(&mut stream, &mut answer, deadline)?;
        match answer == WELCOME {
            true => Ok(stream),
            false => Err(std::io::Error::other("what listens there is no rank")),
        }
    };
    loop {
        match greet() {
            Ok(stream) => return Ok(stream),
            Err(error) if error.kind() == ErrorKind::InvalidInput => return Err(no_place(place)),
            Err(error) if Instant::now() > deadline => {
                let late = patience.late(rank, "the meeting of ranks", [0]);
                return Err(GroupError::Late(format!("{late} (at {place}: {error})")));
            }
            Err(_) => std::thread::sleep(SLEEP),
        }
    }
}

fn no_place(place: &str) -> GroupError {
    GroupError::Launch(format!(
        "ranks cannot meet at `{place}`, which is no HOST:PORT: set MASTER_ADDR and MASTER_PORT, or NCCL_COMM_ID"
    ))
}

fn send(
    stream: &mut TcpStream,
    length: u64,
    bytes: &[u8],
    deadline: Instant,
) -> std::io::Result<()> {
    let mut message = length.to_le_bytes().to_vec();
    if length == FAILED {
        message.extend((bytes.len() as u64).to_le_bytes());
    }
    message.extend(bytes);
    write(stream, &message, deadline)
}

/// Receives a rank's message, or the reason for which that rank failed.
fn receive(stream: &mut TcpStream, deadline: Instant) -> std::io::Result<Result<Vec<u8>, String>> {
    let mut number = || {
        let mut bytes = [0; 8];
        read(stream, &mut bytes, deadline)?;
        std::io::Result::Ok(u64::from_le_bytes(bytes))
    };
    let length = number()?;
    let has_failed = length == FAILED;
    let length = if has_failed { number()? } else { length };
    if length > MOST_BYTES {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length as usize];
    read(stream, &mut bytes, deadline)?;
    Ok(match has_failed {
        true => Err(String::from_utf8_lossy(&bytes).into_owned()),
        false => Ok(bytes),
    })
}

fn read(stream: &mut TcpStream, bytes: &mut [u8], deadline: Instant) -> std::io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut bytes[done..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(error) => goes_on(error)?,
        }
    }
    Ok(())
}

fn write(stream: &mut TcpStream, bytes: &[u8], deadline: Instant) -> std::io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match stream.write(&bytes[done..]) {
            Ok(count) => done += count,
            Err(error) => goes_on(error)?,
        }
    }
    Ok(())
}

/// The time left; an error if there is none, since sockets refuse a timeout of zero.
fn left(deadline: Instant) -> std::io::Result<Duration> {
    match deadline.checked_duration_since(Instant::now()) {
        Some(left) if !left.is_zero() => Ok(left),
        _ => Err(ErrorKind::TimedOut.into()),
    }
}

/// Ignores errors of a wait that timed out or was interrupted: the caller checks the deadline and tries again.
fn goes_on(error: std::io::Error) -> std::io::Result<()> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECONDS: Duration = Duration::from_secs(60);

    /// A place that is free just now.
    fn place() -> String {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        format!("127.0.0.1:{}", listener.local_addr().unwrap().port())
    }

    /// Connects some ranks and runs `act` on each: their results by rank.
    fn each<T: Send>(size: usize, act: impl Fn(Sockets) -> T + Sync) -> Vec<T> {
        let (place, act) = (&place(), &act);
        std::thread::scope(|scope| {
            let ranks = (0..size).map(|rank| {
                scope.spawn(move || {
                    act(Sockets::meet(place, [rank, size], Patience::new(SECONDS)).unwrap())
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_hear_what_all_say() {
        let bytes =
            |rank: usize, round: usize| vec![rank as u8; (rank * 700_001 + round) % 1_000_003];
        each(4, |sockets| {
            for round in 0..5 {
                let all = sockets.share(&bytes(sockets.rank, round)).unwrap();
                let expected: Vec<_> = (0..4).map(|rank| bytes(rank, round)).collect();
                assert!(all == expected, "round {round}");
            }
        });
    }

    /// Rank 0 alone knows who is late, and tells the others before they give up themselves.
    #[test]
    fn a_rank_that_does_not_come_is_named_to_all() {
        let late = std::sync::Barrier::new(3);
        let said = each(3, |mut sockets| {
            sockets.patience = Patience::new(Duration::from_millis(300));
            let said = match sockets.rank {
                1 => String::new(),
                _ => sockets.share(b"x").unwrap_err().to_string(),
            };
            late.wait();
            said
        });
        for said in [&said[0], &said[2]] {
            assert!(
                said.starts_with("rank 1 did not answer rank 0 in 0.3 s, in a share"),
                "{said}"
            );
        }
    }

    #[test]
    fn a_rank_that_goes_is_noticed_at_once() {
        let said = each(3, |sockets| match sockets.rank {
            1 => String::new(),
            _ => sockets.share(b"x").unwrap_err().to_string(),
        });
        for said in [&said[0], &said[2]] {
            assert!(said.starts_with("rank 1 has gone"), "{said}");
        }
    }

    /// A stranger that connects to the port is turned away, and the ranks still meet.
    #[test]
    fn strangers_are_no_ranks() {
        let place = &place();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                Sockets::meet(place, [0, 2], Patience::new(SECONDS))
                    .unwrap()
                    .share(b"0")
            });
            let mut stranger = loop {
                match TcpStream::connect(place) {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::sleep(SLEEP),
                }
            };
            stranger
                .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                .unwrap();
            let second = Sockets::meet(place, [1, 2], Patience::new(SECONDS))
                .unwrap()
                .share(b"1");
            let both = vec![b"0".to_vec(), b"1".to_vec()];
            assert_eq!(second, Ok(both.clone()));
            assert_eq!(first.join().unwrap(), Ok(both));
        });
    }

    #[test]
    fn where_nobody_listens_is_told() {
        let place = place();
        let deadline = Duration::from_millis(50);
        let late = |rank| {
            Sockets::meet(&place, [rank, 2], Patience::new(deadline))
                .err()
                .unwrap()
                .to_string()
        };
        assert!(late(0).starts_with("rank 1 did not answer rank 0 in 0.05 s, in the meeting"));
        let said = late(1);
        assert!(
            said.starts_with("rank 0 did not answer rank 1") && said.contains(&place),
            "{said}"
        );
        let nowhere = Sockets::meet("nowhere", [1, 2], Patience::new(deadline))
            .err()
            .unwrap();
        assert!(nowhere.to_string().contains("no HOST:PORT"), "{nowhere}");
    }
}
