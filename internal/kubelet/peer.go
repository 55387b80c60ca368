package kubelet

import (
	"context"
	"net"

	"google.golang.org/grpc/peer"
)

// A peerAddr is a unique address of a connection: clients of Unix sockets have no address.
type peerAddr struct {
	net.Addr
	conn net.Conn
}

// PeerAddr returns an address for RemoteAddr of an accepted connection. PeerConn then finds
// the connection. Argument address is the real address.
func PeerAddr(address net.Addr, conn net.Conn) net.Addr { return peerAddr{address, conn} }

// PeerConn returns the connection of a gRPC call, found by the context of the call; nil
// without a PeerAddr.
func PeerConn(ctx context.Context) net.Conn {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	address, _ := p.Addr.(peerAddr)
	return address.conn
}
