package files

// MaxSocketPath is how many bytes the path of a Unix socket may have (unix(7)).
const MaxSocketPath = 107
