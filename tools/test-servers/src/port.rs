//! Free loopback ports.

use std::net::{Ipv4Addr, TcpListener};

/// Below the ports that systems give to outgoing connections: such a connection could take the port
/// of a server that is down for a moment.
const RANGE: std::ops::Range<u16> = 10_240..32_768;

/// A port that nobody listens on at this moment. Somebody else may be quicker: be ready to ask again.
pub(crate) fn free() -> u16 {
    loop {
        let random = u64::from_le_bytes(first_eight(uuid::Uuid::new_v4().into_bytes()));
        let port = RANGE.start + (random % u64::from(RANGE.end - RANGE.start)) as u16;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}

fn first_eight(bytes: [u8; 16]) -> [u8; 8] {
    std::array::from_fn(|index| bytes[index])
}
