//! Free loopback ports.

use std::net::{Ipv4Addr, TcpListener};

/// Range below the ports of outgoing connections, because such a connection could take the port of a stopped server.
const RANGE: std::ops::Range<u16> = 10_240..32_768;

/// Returns a port without a listener. Another process might take it first, so be ready to retry.
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
