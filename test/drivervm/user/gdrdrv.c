// A stand-in for a module of somebody else that uses the module nvidia, such as GDRCopy's gdrdrv.
#include <linux/module.h>

int nvidia_stand_in(void);

static int __init start(void) { return nvidia_stand_in(); }
static void __exit stop(void) {}

module_init(start);
module_exit(stop);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("stand-in of gpu-device-plugin's tests for a user of NVIDIA's module; it drives nothing");
