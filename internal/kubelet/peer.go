package kubelet

import (
	"context"
	"net"

	"google.golang.org/grpc/peer"
)

// A peerAddr is the address of a connection that tells it from others: clients of Unix sockets have
// none.
type peerAddr struct {
	net.Addr
	conn net.Conn
}

// PeerAddr returns what RemoteAddr of an accepted connection has to return, so that PeerConn finds
// it. The address is the real one.
func PeerAddr(address net.Addr, conn net.Conn) net.Addr { return peerAddr{address, conn} }

// PeerConn returns the connection by which a call of gRPC came; nil for one without a PeerAddr. ctx
// is that of the call.
func PeerConn(ctx context.Context) net.Conn {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	address, _ := p.Addr.(peerAddr)
	return address.conn
}
