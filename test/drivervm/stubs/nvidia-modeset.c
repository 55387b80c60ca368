// A stand-in for the module nvidia_modeset.
#include <linux/module.h>

int nvidia_stand_in(void);

int nvidia_modeset_stand_in(void) { return nvidia_stand_in(); }
EXPORT_SYMBOL(nvidia_modeset_stand_in);

static int __init start(void) { return nvidia_stand_in(); }
static void __exit stop(void) {}

module_init(start);
module_exit(stop);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(VERSION);
MODULE_DESCRIPTION("stand-in of gpu-device-plugin's tests for NVIDIA's module; it drives nothing");
