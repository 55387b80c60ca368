// Command clusterapi runs the MachineHealthCheck controller of Cluster API: this controller and the cache
// of the Nodes of workload clusters which it needs, as Cluster API's manager configures them. The
// manager has webhooks, too, which listen on all interfaces of the machine; this program listens
// nowhere. Cluster API's controllers for Clusters and Machines are not in it: the caller writes the
// status of these objects, as a provider would.
//
//	clusterapi --kubeconfig=FILE
package main

import (
	"context"
	"flag"
	"os"
	"time"

	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/core/reconcilers/machinehealthcheck"
	"sigs.k8s.io/cluster-api/core/setup"
	"sigs.k8s.io/cluster-api/util/index"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

// name is what the manager of Cluster API calls itself.
const name = "cluster-api-controller-manager"

func main() {
	klog.InitFlags(nil)
	flag.Parse() // controller-runtime has --kubeconfig
	ctrl.SetLogger(klog.Background())
	if err := run(ctrl.SetupSignalHandler()); err != nil {
		klog.Background().Error(err, "Ended")
		os.Exit(1)
	}
}

// run runs the controller until ctx ends.
func run(ctx context.Context) error {
	if err := clusterv1.AddToScheme(scheme.Scheme); err != nil {
		return err
	}
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	manager, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:  scheme.Scheme,
		Metrics: metricsserver.Options{BindAddress: "0"},
		Cache:   setup.ManagerCacheOptions(scheme.Scheme, name, "", 10*time.Minute),
		Client:  setup.ManagerClientOptions(),
	})
	if err != nil {
		return err
	}
	if err := index.AddDefaultIndexes(ctx, manager); err != nil {
		return err
	}
	secrets, err := setup.CreateSecretCachingClient(manager)
	if err != nil {
		return err
	}
	one := controller.Options{MaxConcurrentReconciles: 1}
	nodes, err := clustercache.SetupWithManager(ctx, manager, clustercache.Options{
		SecretClient: secrets,
		Cache:        setup.ClusterCacheCacheOptions(),
		Client:       setup.ClusterCacheClientOptions(name, 20, 30),
	}, one)
	if err != nil {
		return err
	}
	checks := &machinehealthcheck.Reconciler{Client: manager.GetClient(), ClusterCache: nodes}
	if err := checks.SetupWithManager(ctx, manager, one); err != nil {
		return err
	}
	return manager.Start(ctx)
}
