// Package config makes one typed, validated and immutable Config of what defaults, the
// configuration file, environment variables and flags say, the later over the earlier, and watches
// the file. It is the only home of default values, environment variables and YAML.
//
// Everything that can be given in more than one place is one row of the table in options.go. What
// can be judged without hardware is judged here, all problems at once; what depends on the node is
// judged by the plan, so that one file can serve many nodes.
package config
