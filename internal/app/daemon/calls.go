package daemon

// The calls that a daemon answers at its control socket.
const (
	CallStatus         = "status"
	CallStatusWatch    = "status.watch"
	CallReady          = "ready"
	CallAlive          = "alive"
	CallQuiesce        = "quiesce"
	CallResume         = "resume"
	CallHealthClear    = "health.clear"
	CallMIGApply       = "mig.apply"
	CallMIGStatus      = "mig.status"
	CallReset          = "reset"
	CallRecordStart    = "record.start"
	CallRecordStop     = "record.stop"
	CallSimulateInject = "simulate.inject"
	CallSimulateList   = "simulate.list"
	CallSimulateReset  = "simulate.reset"
)
