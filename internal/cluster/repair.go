package cluster

// MayRepair returns why a repair of this node must not begin now; nil while the node has a slot. The
// caller repeats the request until then.
func (c *Cluster) MayRepair(repair string) error { return c.MayChange(repair) }
