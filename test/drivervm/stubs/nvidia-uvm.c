// A stand-in for the module nvidia_uvm.
#include <linux/fs.h>
#include <linux/module.h>

int nvidia_stand_in(void);

static const struct file_operations operations = {.owner = THIS_MODULE};
static int major;

static int __init start(void) {
#ifdef FAILS
	return -EIO;
#endif
	major = register_chrdev(0, "nvidia-uvm", &operations);
	return major < 0 ? major : nvidia_stand_in();
}

static void __exit stop(void) { unregister_chrdev(major, "nvidia-uvm"); }

module_init(start);
module_exit(stop);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(VERSION);
MODULE_DESCRIPTION("stand-in of gpu-device-plugin's tests for NVIDIA's module; it drives nothing");
