// Command client computes with CUDA on the first GPU that it sees, through the driver's libcuda, as
// a program in a container does. It needs neither CUDA's headers nor its toolkit, and at run time
// glibc and the driver's libraries only.
//
//	client info                               what the GPU is
//	client fill [-chunk 64] [-hold 10s]       allocates chunks of MiB until one is refused
//	client take -bytes N [-hold 10s]          allocates memory
//	client managed -bytes N [-hold 10s]       allocates managed memory, and writes to each page of it
//	client spin -for 6s                       multiplies and adds in single precision
//	client fault address|trap|misaligned      makes a mistake
//
// Each line of its output is a JSON object. Where one has the field error, the exit status is 1;
// fault, whose error is wanted, ends with 0.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"
)

var commands = map[string]func(arguments []string) error{
	"info":    info,
	"fill":    fill,
	"take":    func(arguments []string) error { return take(arguments, false) },
	"managed": func(arguments []string) error { return take(arguments, true) },
	"spin":    spin,
	"fault":   fault,
}

func main() {
	runtime.LockOSThread() // the context is that of one thread
	if err := run(os.Args[1:]); err != nil {
		write(map[string]string{"error": err.Error()})
		os.Exit(1)
	}
}

func run(arguments []string) error {
	if len(arguments) == 0 || commands[arguments[0]] == nil {
		return errors.New("the commands are info, fill, take, managed, spin and fault")
	}
	return commands[arguments[0]](arguments[1:])
}

// write prints a line of JSON.
func write(value any) {
	line, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	fmt.Println(string(line))
}

// parse reads the flags of a command, and refuses what is no flag.
func parse(flags *flag.FlagSet, arguments []string) error {
	flags.SetOutput(os.Stderr)
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%s takes no argument %q", flags.Name(), flags.Arg(0))
	}
	return nil
}

// hold waits until a duration has passed, or the process is asked to end.
func hold(d time.Duration) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	<-ctx.Done()
}

func info(arguments []string) error {
	if err := parse(flag.NewFlagSet("info", flag.ContinueOnError), arguments); err != nil {
		return err
	}
	if err := open(); err != nil {
		return err
	}
	g, err := describe()
	if err != nil {
		return err
	}
	m, err := readMemory()
	if err != nil {
		return err
	}
	write(struct {
		gpu
		memory
	}{g, m})
	return nil
}

func fill(arguments []string) error {
	flags := flag.NewFlagSet("fill", flag.ContinueOnError)
	chunk := flags.Uint64("chunk", 64, "the MiB of one allocation")
	held := flags.Duration("hold", 0, "how long the memory is kept; SIGTERM ends it")
	if err := parse(flags, arguments); err != nil {
		return err
	}
	if err := open(); err != nil {
		return err
	}
	var addresses []uint64
	var refusal *failure
	for {
		a, err := allocate(*chunk<<20, false)
		if errors.As(err, &refusal) {
			break
		}
		addresses = append(addresses, a)
	}
	m, err := readMemory()
	if err != nil {
		return err
	}
	write(struct {
		Allocated uint64 `json:"allocated"`
		Refused   string `json:"refused"`
		memory
	}{uint64(len(addresses)) * *chunk << 20, refusal.name, m})
	hold(*held)
	return release(addresses)
}

// take allocates memory of the GPU in chunks, or managed memory at once.
func take(arguments []string, managed bool) error {
	flags := flag.NewFlagSet("take", flag.ContinueOnError)
	size := flags.Uint64("bytes", 1<<30, "how much")
	held := flags.Duration("hold", 0, "how long the memory is kept; SIGTERM ends it")
	if err := parse(flags, arguments); err != nil {
		return err
	}
	if err := open(); err != nil {
		return err
	}
	chunk := uint64(1 << 30)
	if managed {
		chunk = max(*size, 1)
	}
	var addresses []uint64
	for left := *size; left > 0; left -= min(left, chunk) {
		a, err := allocate(min(left, chunk), managed)
		if err != nil {
			return err
		}
		addresses = append(addresses, a)
		if managed {
			if err := touch(a, *size); err != nil {
				return err
			}
		}
	}
	write(map[string]uint64{"allocated": *size})
	hold(*held)
	return release(addresses)
}

// touch writes to each page that lies in the memory as a whole.
func touch(address, size uint64) error {
	const page, threads = 4096, 256
	pages := size / page
	if pages == 0 {
		return nil
	}
	if err := launch("touch", uint((pages+threads-1)/threads), threads, address, pages); err != nil {
		return err
	}
	return wait()
}
