// A stand-in for the module nvidia: version, numbers, references and files in /proc, without any GPU.
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

static const struct file_operations operations = {.owner = THIS_MODULE};
static int caps;
static struct proc_dir_entry *top;

int nvidia_stand_in(void) { return 0; }
EXPORT_SYMBOL(nvidia_stand_in);

static int version(struct seq_file *f, void *unused) {
	seq_puts(f, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " VERSION "  stand-in of tests\n");
	return 0;
}

static int information(struct seq_file *f, void *unused) {
	seq_puts(f, "Model: \t\t stand-in of tests\nDevice Minor: \t 0\n");
	return 0;
}

static int capability(struct seq_file *f, void *unused) {
	seq_puts(f, "DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n");
	return 0;
}

static int __init start(void) {
#ifdef PANICS
	panic("stand-in: a driver that panics\n");
#endif
	int err = register_chrdev(195, "nvidia", &operations);
	if (err)
		return err;
	caps = register_chrdev(0, "nvidia-caps", &operations);
	if (caps < 0) {
		unregister_chrdev(195, "nvidia");
		return caps;
	}
	top = proc_mkdir("driver/nvidia", NULL);
	proc_create_single("version", 0444, top, version);
	proc_create_single("information", 0444, proc_mkdir("0000:00:1f.0", proc_mkdir("gpus", top)), information);
	proc_create_single("config", 0444, proc_mkdir("mig", proc_mkdir("capabilities", top)), capability);
	return 0;
}

static void __exit stop(void) {
	proc_remove(top);
	unregister_chrdev(caps, "nvidia-caps");
	unregister_chrdev(195, "nvidia");
}

module_init(start);
module_exit(stop);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(VERSION);
MODULE_DESCRIPTION("stand-in of gpu-device-plugin's tests for NVIDIA's module; it drives nothing");
