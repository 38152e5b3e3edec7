//! Free loopback ports.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};

/// Range below the ports of outgoing connections, because such a connection could take the port of a stopped server.
const RANGE: std::ops::Range<u16> = 10_240..32_768;

/// A TCP port that is reserved among the tests of this machine while this value exists, with or without a listener.
#[derive(Debug)]
pub(crate) struct Port {
    number: u16,
    /// Holds the UDP port of the same number, which no server uses. The kernel frees it when this process ends.
    _reservation: UdpSocket,
}

impl Port {
    /// Reserves a port without a listener. Another program might take it first, so be ready to retry.
    pub(crate) fn reserve() -> Self {
        loop {
            let random = u64::from_le_bytes(first_eight(uuid::Uuid::new_v4().into_bytes()));
            let number = RANGE.start + (random % u64::from(RANGE.end - RANGE.start)) as u16;
            let address = (Ipv4Addr::LOCALHOST, number);
            if let Ok(reservation) = UdpSocket::bind(address)
                && TcpListener::bind(address).is_ok()
            {
                return Self { number, _reservation: reservation };
            }
        }
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }
}

fn first_eight(bytes: [u8; 16]) -> [u8; 8] {
    std::array::from_fn(|index| bytes[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_reserved_until_its_value_is_dropped() {
        let port = Port::reserve();
        let address = (Ipv4Addr::LOCALHOST, port.number());
        assert!(UdpSocket::bind(address).is_err(), "another test could take the port");
        assert!(TcpListener::bind(address).is_ok(), "the server cannot listen");
        drop(port);
        assert!(UdpSocket::bind(address).is_ok());
    }
}
