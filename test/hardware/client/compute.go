package main

import (
	"errors"
	"flag"
	"fmt"
	"time"
)

func spin(arguments []string) error {
	const rounds, fmas, batch = 6000, 32, 4 // a kernel of the default size takes about 2 ms on an H200
	flags := flag.NewFlagSet("spin", flag.ContinueOnError)
	duration := flags.Duration("for", time.Second, "how long")
	blocks := flags.Uint("blocks", 0, "blocks of a kernel; 0 for 8 a multiprocessor")
	threads := flags.Uint("threads", 256, "threads of a block")
	if err := parse(flags, arguments); err != nil {
		return err
	}
	if err := open(); err != nil {
		return err
	}
	if *blocks == 0 {
		g, err := describe()
		if err != nil {
			return err
		}
		*blocks = 8 * uint(g.SMs)
	}
	target, err := allocate(4096, false)
	if err != nil {
		return err
	}
	some := func(n int) error {
		for range n {
			if err := launch("spin", *blocks, *threads, target, rounds); err != nil {
				return err
			}
		}
		return wait()
	}
	if err := some(1); err != nil {
		return err
	}
	write(map[string]bool{"started": true})

	begin, launches := time.Now(), 0
	for time.Since(begin) < *duration {
		if err := some(batch); err != nil { // more than one, so that the GPU does not wait for this process
			return err
		}
		launches += batch
	}
	write(struct {
		Launches int     `json:"launches"`
		Seconds  float64 `json:"seconds"`
		FMAs     float64 `json:"fmas"`
	}{launches, time.Since(begin).Seconds(), float64(launches) * float64(*blocks) * float64(*threads) * rounds * fmas})
	return release([]uint64{target})
}

func fault(arguments []string) error {
	if len(arguments) != 1 {
		return errors.New("the faults are address, trap and misaligned")
	}
	if err := open(); err != nil {
		return err
	}
	memory, err := allocate(4096, false)
	if err != nil {
		return err
	}
	switch arguments[0] {
	case "address":
		err = launch("store", 1, 1, 0, 1)
	case "misaligned":
		err = launch("store", 1, 1, memory+1, 1)
	case "trap":
		err = launch("abort", 1, 1, 0, 0)
	default:
		return fmt.Errorf("no fault is called %q: they are address, trap and misaligned", arguments[0])
	}
	if err != nil {
		return err
	}
	var f *failure
	if !errors.As(wait(), &f) {
		return fmt.Errorf("%s: the kernel ended without an error", arguments[0])
	}
	write(map[string]string{"error": f.name})
	return nil
}
