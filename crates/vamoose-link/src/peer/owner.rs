//! Finds the owner of a TCP connection by its addresses. The kernel looks the connection up in a hash table (sock_diag(7)), so the
//! cost does not depend on the number of connections.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::OnceLock,
};

use super::Owner;
use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    constants::{AF_INET, AF_INET6, IPPROTO_TCP, TCP_ESTABLISHED},
    inet::{ExtensionFlags, InetRequest, SocketId, StateFlags},
};
use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send,
        socket_with,
    },
};

/// Owner of the socket in this network namespace that is connected from `near` to `far`, if there is one.
pub(super) fn owner(near: SocketAddr, far: SocketAddr) -> io::Result<Option<Owner>> {
    let found = match ask(NLM_F_REQUEST, StateFlags::all(), id(near, far))? {
        NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(found)) => found.header,
        NetlinkPayload::Error(error) if is_absent(&error.to_io()) => {
            return is_available().map(|()| None);
        }
        NetlinkPayload::Error(error) => return Err(error.to_io()),
        _ => return Err(io::Error::other("the kernel answers something else")),
    };
    // Without a connection, the kernel returns the listener. A connection that its process has closed, or not accepted yet, has no
    // owner and is listed as root's.
    let is_owned = found.state == TCP_ESTABLISHED && found.inode != 0;
    Ok(is_owned.then_some(Owner {
        uid: found.uid,
        inode: found.inode,
        under_way: found.send_queue,
    }))
}

/// Checks that the kernel has tcp_diag: without it, nothing is ever found.
fn is_available() -> io::Result<()> {
    static IS_AVAILABLE: OnceLock<()> = OnceLock::new();
    if IS_AVAILABLE.get().is_some() {
        return Ok(());
    }
    // Asks for sockets in no state: the answer is empty.
    let nothing = ask(
        NLM_F_REQUEST | NLM_F_DUMP,
        StateFlags::empty(),
        SocketId::new_v4(),
    )?;
    judge_dump(&nothing)?;
    IS_AVAILABLE.get_or_init(|| ());
    Ok(())
}

/// Checks the end of a dump, which may be an error.
fn judge_dump(answer: &NetlinkPayload<SockDiagMessage>) -> io::Result<()> {
    let error = match answer {
        NetlinkPayload::Error(error) => error.to_io(),
        NetlinkPayload::Done(done) if done.code != 0 => {
            io::Error::from_raw_os_error(done.code.saturating_neg())
        }
        _ => return Ok(()),
    };
    match is_absent(&error) {
        true => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "the kernel does not tell: it needs tcp_diag (CONFIG_INET_TCP_DIAG); `modprobe tcp_diag` loads it",
        )),
        false => Err(error),
    }
}

fn is_absent(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::NOENT)
}

fn id(near: SocketAddr, far: SocketAddr) -> SocketId {
    let scope = match near {
        SocketAddr::V6(near) => near.scope_id(),
        SocketAddr::V4(_) => 0,
    };
    SocketId {
        source_port: near.port(),
        destination_port: far.port(),
        source_address: near.ip(),
        destination_address: far.ip(),
        interface_id: scope,
        // Whichever socket it is.
        cookie: [0xff; 8],
    }
}

fn ask(
    flags: u16,
    states: StateFlags,
    socket_id: SocketId,
) -> io::Result<NetlinkPayload<SockDiagMessage>> {
    let family = match socket_id.source_address {
        IpAddr::V4(_) => AF_INET,
        IpAddr::V6(_) => AF_INET6,
    };
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    let request = SockDiagMessage::InetRequest(InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id,
    });
    let mut request = NetlinkMessage::new(header, request.into());
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    let kernel = socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )?;
    send(&kernel, &bytes, SendFlags::empty())?;
    // The kernel has answered by then.
    let mut answer = [0; 4096];
    let (length, _) = recv(&kernel, &mut answer, RecvFlags::DONTWAIT)?;
    let answer = NetlinkMessage::deserialize(&answer[..length]).map_err(io::Error::other)?;
    Ok(answer.payload)
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::DoneMessage;

    use super::*;

    #[test]
    fn a_dump_that_fails_is_no_answer() {
        for (code, expected) in [
            (0, None),
            (
                -Errno::NOENT.raw_os_error(),
                Some(io::ErrorKind::Unsupported),
            ),
            (
                -Errno::PERM.raw_os_error(),
                Some(io::ErrorKind::PermissionDenied),
            ),
        ] {
            let mut done = DoneMessage::default();
            done.code = code;
            let judged = judge_dump(&NetlinkPayload::Done(done));
            assert_eq!(judged.err().map(|error| error.kind()), expected, "{code}");
        }
    }
}
