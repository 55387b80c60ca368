package drivercli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
)

var realClock = clock.RealClock{}

// followPause is the time between two questions about the progress.
const followPause = 300 * time.Millisecond

func addSocketFlag(cmd *cobra.Command) *string {
	return cmd.Flags().String("socket", driverapi.DefaultSocket, "control socket of gpu-driver serve")
}

// A client makes the calls of a command.
type client struct {
	ctx    context.Context //nolint:containedctx // of one command
	socket string
}

func (c client) call(name string, a driverapi.Arguments) (driverapi.Status, error) {
	s, err := driverapi.Call(c.ctx, c.socket, name, a)
	var reason *net.OpError
	if errors.Is(err, control.ErrNoDaemon) && errors.As(err, &reason) {
		err = fmt.Errorf("`gpu-driver serve` does not answer: start its pod, or name its socket with --socket: %w",
			reason)
	}
	return s, err
}

// digest returns the digest of the folder that the user named: by its digest or the begin of it, or by
// its version or its branch.
func (c client) digest(name string) (string, error) {
	s, err := c.call(driverapi.CallStatus, driverapi.Arguments{})
	if err != nil {
		return "", err
	}
	name = strings.TrimPrefix(strings.ToLower(name), "sha256:")
	const shortest = 6
	var found, all []string
	for _, f := range s.Folders {
		if f.Version == name || strings.HasPrefix(f.Version, name+".") ||
			len(name) >= shortest && strings.HasPrefix(f.Digest, name) {
			found = append(found, f.Digest)
		}
		all = append(all, f.Version+" (sha256:"+f.Digest+")")
	}
	switch len(found) {
	case 0:
		return "", fmt.Errorf("the node has no driver folder %s; it has: %s", name,
			cmp.Or(strings.Join(all, ", "), "none"))
	case 1:
		return found[0], nil
	}
	return "", fmt.Errorf("%d driver folders are meant by %s; name one by its digest: %s", len(found), name,
		strings.Join(found, ", "))
}

// place copies a folder to the node, and shows the progress.
func (c client) place(name string, show *progress) error {
	digest, err := c.digest(name)
	if err != nil {
		return err
	}
	s, err := c.call(driverapi.CallPlace, driverapi.Arguments{Digest: digest})
	for began := false; err == nil; s, err = c.wait() {
		i := slices.IndexFunc(s.Folders, func(f driverapi.Folder) bool { return f.Digest == digest })
		switch {
		case i < 0:
			return fmt.Errorf("the folder %s is no longer there", digest)
		case s.Folders[i].IsHere:
			show.line("placed", 100, s.Folders[i].Version)
			return nil
		case began && s.Folders[i].Problem != "":
			return errors.New(s.Folders[i].Problem)
		}
		began = true
		show.line("placing", s.Folders[i].Percent, s.Folders[i].Version)
	}
	return err
}

// fetch downloads an archive, and shows the progress until its folder is placed.
func (c client) fetch(source, archive string, show *progress) error {
	a := driverapi.Arguments{Source: source, Archive: archive}
	for {
		s, err := c.call(driverapi.CallFetch, a)
		if err != nil {
			return err
		}
		for _, f := range s.Folders {
			if slices.Contains(f.Archives, archive) {
				show.line("placed", 100, f.Version+" sha256:"+f.Digest)
				return nil
			}
		}
		if d := s.Download; d != nil {
			if d.IsFinal {
				return errors.New(d.Problem)
			}
			show.line("fetching", d.Percent, d.Problem)
		}
		if _, err := c.wait(); err != nil {
			return err
		}
	}
}

// wait returns the status after a moment.
func (c client) wait() (driverapi.Status, error) {
	select {
	case <-c.ctx.Done():
		return driverapi.Status{}, c.ctx.Err()
	case <-time.After(followPause):
	}
	return c.call(driverapi.CallStatus, driverapi.Arguments{})
}

// follow shows the progress of a change until it waits for a call or ends.
func (c client) follow(s driverapi.Status, show *progress) error {
	for {
		if s.Change == nil {
			return nil
		}
		show.line(string(s.Change.Step), s.Change.Percent, s.Change.Reason)
		switch s.Change.Step {
		case driverapi.StepUnproven, driverapi.StepNextBoot:
			return nil
		case driverapi.StepFailed:
			return errors.New("the change of the driver failed: " + s.Change.Reason)
		default:
		}
		var err error
		if s, err = c.wait(); c.ctx.Err() != nil {
			return errors.New("the change goes on; `gpu-driver status` shows it, and `gpu-driver cancel` ends it")
		} else if err != nil {
			return err
		}
	}
}

func newFetchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "fetch URL --sha256 DIGEST",
		Short: "Download a driver to this node",
		Long: "fetch downloads an archive that `gpu-driver pack --archive` has written, compares it with its digest\n" +
			"and unpacks it. The loaded driver stays. The URL must be below one of --download-from of `gpu-driver\n" +
			"serve`, which goes on with a download that was interrupted.",
		Example: "  gpu-driver fetch https://drivers.example.com/580.95.05.tar.gz --sha256 DIGEST",
		Args:    oneArgument("the URL of an archive"),
	}
	socket := addSocketFlag(cmd)
	archive := cmd.Flags().String("sha256", "", "SHA-256 digest of the archive, in hexadecimal; required")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if *archive == "" {
			return errors.New("--sha256 is missing: give the digest that gpu-driver pack has printed for the archive")
		}
		show := newProgress(cmd.OutOrStdout())
		defer show.end()
		digest := strings.ToLower(strings.TrimPrefix(*archive, "sha256:"))
		return client{cmd.Context(), *socket}.fetch(args[0], digest, show)
	}
	return cmd
}

func newSwapCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "swap DIGEST|VERSION",
		Short: "Change the driver of this node now",
		Long: "swap places a driver folder, unloads the present driver and loads the new one. While something uses\n" +
			"the driver, it waits and names the users. Then the new driver is unproven: try it, and run `gpu-driver\n" +
			"confirm` or `gpu-driver revert`. If the kernel refuses the new driver, the former one is loaded again.",
		Example: "  gpu-driver swap 580.95.05",
		Args:    oneArgument("the digest or the version of a driver folder"),
	}
	socket := addSocketFlag(cmd)
	confirm := cmd.Flags().Bool("confirm", false, "confirm the change as soon as the kernel has loaded the driver")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c := client{cmd.Context(), *socket}
		digest, err := c.digest(args[0])
		if err != nil {
			return err
		}
		s, err := c.call(driverapi.CallSwap, driverapi.Arguments{Digest: digest})
		if err != nil {
			return err
		}
		show := newProgress(cmd.OutOrStdout())
		err = c.follow(s, show)
		show.end()
		if err != nil {
			return err
		}
		if *confirm {
			s, err = c.call(driverapi.CallConfirm, driverapi.Arguments{Digest: digest})
		} else {
			s, err = c.call(driverapi.CallStatus, driverapi.Arguments{})
		}
		if err != nil {
			return err
		}
		return printStatus(cmd.OutOrStdout(), s)
	}
	return cmd
}

// newCallCommand returns a command that makes one call and prints the status.
func newCallCommand(use, call, short, long string) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Long: long, Args: cobra.NoArgs}
	named := strings.Contains(use, " ")
	if named {
		cmd.Args = oneArgument("the digest or the version of a driver folder")
	}
	socket := addSocketFlag(cmd)
	var reason string
	if call == driverapi.CallRevert {
		cmd.Flags().StringVar(&reason, "reason", "", "why the driver does not work")
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c := client{cmd.Context(), *socket}
		a := driverapi.Arguments{Reason: reason}
		var err error
		if named {
			if a.Digest, err = c.digest(args[0]); err != nil {
				return err
			}
		}
		s, err := c.call(call, a)
		if err != nil {
			return err
		}
		if call == driverapi.CallRevert || call == driverapi.CallNextBoot {
			show := newProgress(cmd.OutOrStdout())
			err := c.follow(s, show)
			show.end()
			if call == driverapi.CallNextBoot && err != nil {
				return err
			}
			if s, err = c.call(driverapi.CallStatus, driverapi.Arguments{}); err != nil {
				return err
			}
		}
		return printStatus(cmd.OutOrStdout(), s)
	}
	return cmd
}

func newStatusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "status", Short: "Show the drivers of this node and the progress of a change", Args: cobra.NoArgs,
	}
	socket := addSocketFlag(cmd)
	output := cmd.Flags().StringP("output", "o", "", "json for a form for programs")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := client{cmd.Context(), *socket}.call(driverapi.CallStatus, driverapi.Arguments{})
		switch {
		case *output != "" && *output != "json":
			return fmt.Errorf("--output %s is unknown: json is the only form", *output)
		case err != nil:
			return err
		case *output == "json":
			text, err := json.MarshalIndent(s, "", "  ")
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(append(text, '\n'))
			return err
		}
		return printStatus(cmd.OutOrStdout(), s)
	}
	return cmd
}

func megabytes(bytes int64) string { return fmt.Sprintf("%.1f MB", float64(bytes)/1e6) }

// printStatus prints a status for people.
func printStatus(to io.Writer, s driverapi.Status) error {
	terminal.Clean(&s)
	versions := map[string]string{}
	for _, f := range s.Folders {
		versions[f.Digest] = f.Version
	}
	name := func(digest string) string {
		if digest == "" {
			return "none"
		}
		return strings.TrimSpace(versions[digest] + " sha256:" + digest[:min(len(digest), 12)])
	}
	var b strings.Builder
	loaded := cmp.Or(s.LoadedVersion, "none")
	switch {
	case s.LoadedDigest != "":
		loaded = name(s.LoadedDigest)
	case s.LoadedVersion != "":
		loaded += ", by another program"
	}
	fmt.Fprintf(&b, "kernel     %s\nloaded     %s\nnext boot  %s\n", s.Kernel, loaded, name(s.Current))
	for _, f := range s.Folders {
		where := "among the sources only"
		if f.IsHere {
			where = "placed"
		}
		fmt.Fprintf(&b, "driver     %s: %s\n", name(f.Digest), strings.TrimSuffix(where+": "+f.Problem, ": "))
	}
	if d := s.Download; d != nil {
		size := megabytes(d.Done)
		if d.Total > 0 {
			size += " of " + megabytes(d.Total)
		}
		percent := fmt.Sprintf("%3d %%", d.Percent)
		if terminal.Columns(to) > 0 {
			percent = bar(d.Percent)
		}
		fmt.Fprintf(&b, "download   %s: %s, %s, since %s\n", d.Source, percent, size, d.Since.Format(time.RFC3339))
		if d.Problem != "" {
			fmt.Fprintf(&b, "why        %s\n", d.Problem)
		}
	}
	for _, r := range s.Refusals {
		fmt.Fprintf(&b, "refused    %s\n", r)
	}
	if c := s.Change; c != nil {
		fmt.Fprintf(&b, "change     from %s to %s\n", name(c.From), name(c.To))
		percent := fmt.Sprintf("%3d %%", c.Percent)
		if terminal.Columns(to) > 0 {
			percent = bar(c.Percent)
		}
		fmt.Fprintf(&b, "step       %s %s, since %s\n", c.Step, percent, c.Since.Format(time.RFC3339))
		if c.Reason != "" {
			fmt.Fprintf(&b, "why        %s\n", c.Reason)
		}
		for _, h := range c.Holders {
			fmt.Fprintf(&b, "held by    %s %s: %s\n", h.Kind, h.Name, h.Release)
		}
		switch c.Step {
		case driverapi.StepUnproven:
			fmt.Fprintln(&b, "what next  try the driver, then: gpu-driver confirm, or gpu-driver revert")
		case driverapi.StepFailed:
			fmt.Fprintln(&b, "what next  gpu-driver cancel forgets this change")
		case driverapi.StepNextBoot:
			fmt.Fprintln(&b, "what next  restart the node, or: gpu-driver cancel")
		default:
		}
	}
	_, err := io.WriteString(to, b.String())
	return err
}
