package driverpack

// SetStep replaces the function that is called between the steps of writing.
func SetStep(step func()) { atStep = step }
