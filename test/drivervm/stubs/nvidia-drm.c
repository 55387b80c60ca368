// A stand-in for the module nvidia_drm.
#include <linux/module.h>

int nvidia_modeset_stand_in(void);

static int __init start(void) { return nvidia_modeset_stand_in(); }
static void __exit stop(void) {}

module_init(start);
module_exit(stop);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(VERSION);
MODULE_DESCRIPTION("stand-in of gpu-device-plugin's tests for NVIDIA's module; it drives nothing");
