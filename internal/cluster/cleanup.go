package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/keeper"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// cleanupTimeout limits the requests of a cleanup.
const cleanupTimeout = 30 * time.Second

const cleanupLong = `cleanup-node removes what an uninstalled daemon has left on its Node object: taints, the condition
GPUHealthy, labels and annotations, and pauses of DaemonSets. Conditions of features.conditionTypes stay. The command
cleanup removes what is left on the node itself.`

func newCleanupCommand(o Options) *cobra.Command {
	var settings config.Startup
	var dry bool
	var await string
	cmd := &cobra.Command{
		Use: "cleanup-node", Short: "Remove what an uninstalled daemon has left on its Node object",
		Long: cleanupLong,
		Args: cobra.NoArgs,
	}
	cmd.Flags().StringVar(&settings.Kubeconfig, "kubeconfig", os.Getenv("KUBECONFIG"),
		"file with the address and the credentials of the API server [$KUBECONFIG]")
	cmd.Flags().StringVar(&settings.NodeName, "node-name", os.Getenv("NODE_NAME"), "name of the node [$NODE_NAME]")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "print what would be removed, and remove nothing")
	cmd.Flags().StringVar(&await, "await", "",
		"NAMESPACE/NAME of a DaemonSet: wait until all of its pods are Ready, and remove nothing")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if await != "" {
			return awaitPods(cmd.Context(), o, settings, await)
		}
		if settings.NodeName == "" {
			return errors.New("the name of the node is not known: set --node-name or NODE_NAME")
		}
		done, err := CleanNode(cmd.Context(), o, settings, dry)
		return errors.Join(daemon.PrintRemovals(cmd.OutOrStdout(), done, dry), err)
	}
	return cmd
}

// awaitInterval is the time between two checks of a DaemonSet's pods.
const awaitInterval = 2 * time.Second

// awaitPods waits until all pods of a DaemonSet, "NAMESPACE/NAME", are Ready. Their nodes are then
// clean.
func awaitPods(ctx context.Context, o Options, settings config.Startup, set string) error {
	namespace, name, _ := strings.Cut(set, "/")
	client := kubeapi.New(kubeapi.Options{Kubeconfig: settings.Kubeconfig, Version: version.String(), Dial: o.Dial})
	for logged := ""; ; {
		ready, wanted, err := client.DaemonSetPods(ctx, namespace, name)
		if err == nil && ready == wanted {
			return nil
		}
		state := fmt.Sprintf("%d of %d nodes are clean", ready, max(wanted, 0))
		if err != nil {
			state = err.Error()
		}
		if state != logged {
			klog.FromContext(ctx).Info("Waiting for the cleanup of nodes", "reason", state)
			logged = state
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(awaitInterval):
		}
	}
}

// CleanNode removes what an uninstalled daemon has left on its Node: taints, the condition GPUHealthy,
// labels and annotations, and pauses of DaemonSets for a MIG layout. Conditions of further types
// (features.conditionTypes) stay. It works without a daemon. With dry, it removes nothing.
func CleanNode(ctx context.Context, o Options, settings config.Startup, dry bool) (done []daemon.Removal, err error) {
	ctx, cancel := context.WithTimeout(ctx, cleanupTimeout)
	defer cancel()
	client := kubeapi.New(kubeapi.Options{
		Kubeconfig: settings.Kubeconfig, Node: settings.NodeName, Version: version.String(), Dial: o.Dial,
	})
	k := keeper.New(client, nil)
	node, err := k.Refresh(ctx)
	if err != nil {
		return nil, err
	}
	remove := func(what string, work func() error) {
		if !dry {
			if failed := work(); failed != nil {
				err = errors.Join(err, failed)
				return
			}
		}
		done = append(done, daemon.Removal{What: what + " of the Node " + settings.NodeName})
	}
	for _, taint := range kubeapi.OwnTaints() {
		if taint.IsOn(node) {
			remove("taint "+taint.String(), func() (err error) {
				node, err = k.Change(ctx, node, func(node kubeapi.Node) kubeapi.NodePatch {
					if !taint.IsOn(node) {
						return nil
					}
					return kubeapi.TaintPatch{Taint: taint}
				})
				return err
			})
		}
	}
	if slices.ContainsFunc(node.Conditions, func(c kubeapi.Condition) bool { return c.Type == keeper.ConditionType }) {
		remove("condition "+keeper.ConditionType, func() error {
			return client.RemoveCondition(ctx,
				keeper.ConditionType)
		})
	}
	if paused := keeper.PausedOn(node); len(paused) > 0 {
		remove("pause by "+strings.Join(paused, ", "), func() error {
			_, err := client.PatchNode(ctx, node, keeper.Resume(paused))
			return err
		})
	}
	owned, failed := client.OwnFields(ctx)
	if err = errors.Join(err, failed); len(owned) > 0 {
		remove("labels and annotations "+strings.Join(owned, ", "),
			func() error { return client.RemoveOwnFields(ctx, node.UID) })
	}
	return done, err
}
