package holders

// Answers are what one reading of the kubelet's accounts returned.
type Answers struct {
	Checkpoint      Account // what the checkpoint says, with Kubelet and Began; Evidence.Account adds to its maps
	CheckpointErr   error   // why the checkpoint could not be read
	NoCheckpoint    bool    // there is none
	PodResources    map[Key]Holder
	PodResourcesErr error // why PodResources did not answer
	NoPodResources  bool  // there is no PodResources to ask
	Restarted       bool  // another kubelet has started since Began
	// Before and Connected are the numbers of the connection to PodResources before and after the
	// question.
	Before, Connected uint64
}

// Evidence turns Answers into Accounts. It remembers whether the kubelet has answered through
// PodResources before. The zero value is ready.
type Evidence struct {
	kubelet  uint64 // incarnation of the kubelet at the last reading
	answered bool   // this kubelet has answered through PodResources
}

// Account returns which pods hold devices.
//
// The checkpoint names every pod that holds a device, because the kubelet itself starts from the
// checkpoint. PodResources leaves out init containers, and most pods until the kubelet is connected
// to the API server. PodResources adds only the pods that the kubelet could not write to the
// checkpoint.
func (e *Evidence) Account(r Answers) Account {
	a, answers := r.Checkpoint, r.PodResourcesErr == nil
	for key, holder := range r.PodResources {
		a.Held[key] = holder
	}
	a.NoPodResources = a.Kubelet != 0 && r.NoPodResources
	if e.kubelet != a.Kubelet {
		e.kubelet, e.answered = a.Kubelet, false
	}
	switch {
	case a.Kubelet == 0:
		a.UnknownBecause = "the kubelet is not running"
	case r.Restarted, r.Connected != r.Before && r.Connected > 1:
		a.UnknownBecause = "the kubelet has just restarted"
	case r.CheckpointErr != nil:
		a.UnknownBecause, a.Unreadable, a.Partial = r.CheckpointErr.Error(), true, answers
		a.NoCheckpoint = answers && r.NoCheckpoint
	case !answers && e.answered:
		a.UnknownBecause, a.Partial = r.PodResourcesErr.Error(), true
	}
	e.answered = e.answered || answers
	if a.UnknownBecause == "" && answers {
		a.Source = Source{Incarnation: a.Kubelet, Connections: r.Connected}
	}
	return a
}
