package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

func newTopologyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "topology",
		Short: "Print the connections between the GPUs of a node",
		Long: "topology scans this node once, or a simulated node: the node of --simulate or of the running\n" +
			"daemon. It prints the connections between GPUs as a matrix like nvidia-smi topo -m, with the score\n" +
			"of each connection.",
		Example: "  gpu-device-plugin topology --simulate dgx-1\n" +
			"  gpu-device-plugin topology --simulate dgx-1 -o dot | neato -Tsvg > dgx-1.svg\n" +
			"  gpu-device-plugin topology prefer --simulate dgx-1 --size 3 --available 1,2,3,4 --required 4",
		Args: noArguments,
	}
	config.AddFlags(cmd.PersistentFlags(), nodeFlags...)
	o := matrixOutput("matrix")
	cmd.Flags().VarP(&o, "output", "o", "output format")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		gpus, err := scanGPUs(cmd)
		if err != nil {
			return err
		}
		return o.print(cmd.OutOrStdout(), topology.New(gpus).Matrix())
	}
	cmd.AddCommand(newPreferCommand())
	return cmd
}

// scanGPUs looks at the node that a command's flags name.
func scanGPUs(cmd *cobra.Command) ([]inventory.GPU, error) {
	c, _, err := config.Load(asTheDaemon(cmd.Context(), cmd.Flags()))
	if err != nil {
		return nil, err
	}
	simulateAsTheDaemon(cmd, &c)
	snapshot, err := scanOnce(cmd.Context(), c)
	return snapshot.GPUs, err
}

// A matrixOutput is how the connections are printed.
type matrixOutput string

func (o *matrixOutput) String() string { return string(*o) }
func (*matrixOutput) Type() string     { return "matrix|json|dot" }

func (o *matrixOutput) Set(text string) error {
	switch text {
	case "matrix", "json", "dot":
		*o = matrixOutput(text)
		return nil
	}
	return fmt.Errorf("unknown output %q: give matrix, json or dot", text)
}

func (o matrixOutput) print(w io.Writer, m topology.Matrix) error {
	switch o {
	case "json":
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		return encoder.Encode(m)
	case "dot":
		_, err := io.WriteString(w, dot(m))
		return err
	default:
		return printMatrix(w, m)
	}
}

// printMatrix prints a row for each GPU: its NUMA node, and its connection to every other
// GPU with the score of the connection.
func printMatrix(w io.Writer, m topology.Matrix) error {
	columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, gpu := range m.GPUs {
		fmt.Fprintf(columns, "\tGPU%d", gpu.Index)
	}
	fmt.Fprintln(columns, "\tNUMA")
	for _, gpu := range m.GPUs {
		fmt.Fprintf(columns, "GPU%d", gpu.Index)
		for _, peer := range gpu.Peers {
			fmt.Fprintf(columns, "\t%s", peer.Label)
			if peer.Score > 0 {
				fmt.Fprintf(columns, " %d", peer.Score)
			}
		}
		numa := "-"
		if gpu.NUMANode != inventory.NoNUMANode {
			numa = strconv.Itoa(gpu.NUMANode)
		}
		fmt.Fprintf(columns, "\t%s\n", numa)
	}
	if err := columns.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, `
NV<n>  n active NVLink lanes, straight or through NVSwitches
PSB    one board               PHB   a PCIe host bridge
PIX    at most one PCIe bridge NODE  host bridges of one NUMA node
PXB    several PCIe bridges    SYS   the interconnect between NUMA nodes
The number is the score of the connection.
`)
	return err
}

// dot returns the graph in the language of Graphviz: an edge for each connection, the thicker the
// more it counts.
func dot(m topology.Matrix) string {
	highest := 1
	for _, gpu := range m.GPUs {
		for _, peer := range gpu.Peers {
			highest = max(highest, peer.Score)
		}
	}
	var b strings.Builder
	b.WriteString("graph gpus {\n  node [shape=box];\n")
	for a, gpu := range m.GPUs {
		fmt.Fprintf(&b, "  gpu%d [label=%q];\n", a, fmt.Sprintf("GPU%d\n%s", gpu.Index, gpu.BDF))
		for c, peer := range gpu.Peers[:a] {
			if peer.Score > 0 {
				fmt.Fprintf(&b, "  gpu%d -- gpu%d [label=\"%s %d\", penwidth=%.1f];\n",
					c, a, peer.Label, peer.Score, 0.5+4*float64(peer.Score)/float64(highest))
			}
		}
	}
	b.WriteString("}\n")
	return b.String()
}

func newPreferCommand() *cobra.Command {
	var available, required []string
	var size, runnersUp int
	cmd := &cobra.Command{
		Use:   "prefer",
		Short: "Print the best GPUs for a container, and the next best sets",
		Long: "prefer chooses whole GPUs by the rules of the daemon: the set with the highest score, and among\n" +
			"equal scores the set with the lowest cost for the GPUs that stay free. Name GPUs by index or UUID.\n" +
			"Healthy GPUs that are not in --available count as in use.",
		Args: cobra.NoArgs,
	}
	flags := cmd.Flags()
	flags.IntVar(&size, "size", 1, "number of GPUs to choose")
	flags.StringSliceVar(&available, "available", nil, "GPUs to choose from; default: all Healthy GPUs")
	flags.StringSliceVar(&required, "required", nil, "GPUs that the set must contain")
	flags.IntVar(&runnersUp, "runners-up", 3, "number of next best sets to print")
	o := addOutputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if size < 1 || runnersUp < 0 {
			return errors.New("--size must be 1 or more, and --runners-up not negative")
		}
		gpus, err := scanGPUs(cmd)
		if err != nil {
			return err
		}
		p, err := newPreferredSets(gpus, available, required, size, runnersUp)
		if err != nil {
			return err
		}
		return o.print(cmd.OutOrStdout(), &p, func(w io.Writer) { p.table(w) })
	}
	return cmd
}

// preferredSets are the best sets of GPUs, for printing.
type preferredSets struct {
	// Sets are the choice and the runners-up.
	Sets []preferredSet `json:"sets"`
}

type preferredSet struct {
	Indices []int    `json:"indices"`
	UUIDs   []string `json:"uuids"`
	// Score counts first; Cost decides between equal scores.
	Score int64 `json:"score"`
	Cost  int64 `json:"cost"`
	// Exact says that no set is better than this set and the sets before; else no set has
	// a higher score than Bound.
	Exact bool  `json:"exact"`
	Bound int64 `json:"bound"`
}

func newPreferredSets(gpus []inventory.GPU, available, required []string, size, runnersUp int) (preferredSets, error) {
	graph := topology.New(gpus)
	byPosition := make([]inventory.GPU, graph.Len())
	var healthy topology.GPUSet
	for _, gpu := range gpus {
		p, ok := graph.Position(gpu.UUID)
		if !ok {
			continue
		}
		byPosition[p] = gpu
		if gpu.Health.Allocatable() {
			healthy |= topology.SetOf(p)
		}
	}
	request := topology.Request{Available: healthy, Size: size}
	var err error
	if available != nil {
		if request.Available, err = gpusNamed(byPosition, available); err != nil {
			return preferredSets{}, fmt.Errorf("--available: %w", err)
		}
	}
	if request.Required, err = gpusNamed(byPosition, required); err != nil {
		return preferredSets{}, fmt.Errorf("--required: %w", err)
	}
	request.Busy = healthy &^ request.Available
	best := graph.Best(request, 1+runnersUp)
	if len(best) == 0 {
		return preferredSets{}, fmt.Errorf("%d GPUs are requested, and %d are available", size,
			(request.Available | request.Required).Len())
	}
	var p preferredSets
	for _, choice := range best {
		set := preferredSet{Score: choice.Score, Cost: choice.Cost, Exact: choice.Exact, Bound: choice.Bound}
		for position := range choice.Set.All() {
			set.Indices = append(set.Indices, byPosition[position].Index)
			set.UUIDs = append(set.UUIDs, byPosition[position].UUID)
		}
		p.Sets = append(p.Sets, set)
	}
	return p, nil
}

// gpusNamed returns the GPUs with the given indices or UUIDs.
func gpusNamed(gpus []inventory.GPU, names []string) (topology.GPUSet, error) {
	var set topology.GPUSet
	for _, name := range names {
		found := topology.GPUSet(0)
		for position, gpu := range gpus {
			if gpu.UUID == name || strconv.Itoa(gpu.Index) == name {
				found |= topology.SetOf(position)
			}
		}
		if found == 0 {
			return 0, fmt.Errorf("no GPU has the index or UUID %q", name)
		}
		set |= found
	}
	return set, nil
}

func (p preferredSets) table(w io.Writer) {
	fmt.Fprintln(w, "\tGPUS\tSCORE\tCOST")
	for i, set := range p.Sets {
		rank := "choice"
		if i > 0 {
			rank = fmt.Sprintf("runner-up %d", i)
		}
		score := strconv.FormatInt(set.Score, 10)
		if !set.Exact {
			score = fmt.Sprintf("%d (the best set has at most %d)", set.Score, set.Bound)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\n", rank, strings.Trim(fmt.Sprint(set.Indices), "[]"), score, set.Cost)
	}
}
