package monitoring

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// prometheus is the address of a running Prometheus.
type prometheus string

var listening = regexp.MustCompile(`msg="?Listening on"? .*address=(\S+)`)

// startPrometheus runs Prometheus with a configuration file until the test ends. It listens on
// loopback.
func startPrometheus(t *testing.T, config string) prometheus {
	t.Helper()
	cmd := exec.Command(tool(t, "prometheus"), "--config.file", config, "--storage.tsdb.path", t.TempDir(),
		"--web.listen-address", "127.0.0.1:0", "--log.level", "info")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	log, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	address := make(chan string, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for lines := bufio.NewScanner(log); lines.Scan(); {
			if found := listening.FindStringSubmatch(lines.Text()); found != nil {
				address <- found[1]
			}
		}
		_ = cmd.Wait() // it was killed
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		<-ended
	})
	select {
	case at := <-address:
		return prometheus("http://" + at)
	case <-ended:
		t.Fatal("Prometheus ended")
	case <-time.After(patience):
		t.Fatal("Prometheus does not listen")
	}
	return ""
}

// A series is one of the series of an answer.
type series struct {
	Metric map[string]string `json:"metric"`
	Value  []any             `json:"value"`
	Values [][]any           `json:"values"`
}

// number returns a value of a series, a pair of time and text.
func number(pair []any) float64 {
	text, _ := pair[1].(string)
	value, _ := strconv.ParseFloat(text, 64)
	return value
}

// finite returns the series with at least one number. A quantile of no observations is not a
// number.
func finite(all []series) (some []series) {
	for _, s := range all {
		s.Values = slices.DeleteFunc(s.Values, func(pair []any) bool { return math.IsNaN(number(pair)) || math.IsInf(number(pair), 0) })
		if len(s.Values) > 0 {
			some = append(some, s)
		}
	}
	return some
}

// query evaluates an expression now.
func (p prometheus) query(ctx context.Context, expression string) ([]series, error) {
	return p.ask(ctx, "query", url.Values{"query": {expression}})
}

// queryAt evaluates an expression at a moment.
func (p prometheus) queryAt(ctx context.Context, expression string, at time.Time) ([]series, error) {
	return p.ask(ctx, "query", url.Values{"query": {expression},
		"time": {strconv.FormatFloat(float64(at.UnixMilli())/1000, 'f', 3, 64)}})
}

// queryRange evaluates an expression over a time, one second apart at least, and returns the series
// with a number.
func (p prometheus) queryRange(ctx context.Context, expression string, from, to time.Time,
	apart time.Duration) ([]series, error) {
	seconds := func(t time.Time) string { return strconv.FormatFloat(float64(t.UnixMilli())/1000, 'f', 3, 64) }
	step := strconv.FormatFloat(max(apart.Seconds(), 1), 'f', 3, 64)
	found, err := p.ask(ctx, "query_range", url.Values{
		"query": {expression}, "start": {seconds(from)}, "end": {seconds(to)}, "step": {step},
	})
	return finite(found), err
}

func (p prometheus) ask(ctx context.Context, call string, arguments url.Values) ([]series, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, string(p)+"/api/v1/"+call+"?"+arguments.Encode(),
		http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	var answer struct {
		Status, Error string
		Data          struct{ Result []series }
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return nil, err
	}
	if answer.Status != "success" {
		return nil, fmt.Errorf("%s: %s", arguments.Get("query"), answer.Error)
	}
	return answer.Data.Result, nil
}
