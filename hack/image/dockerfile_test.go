package image

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReadStage(t *testing.T) {
	t.Parallel()
	const build = "FROM golang AS build\nRUN a \\\n  && b\n\n"
	tests := []struct {
		name       string
		dockerfile string
		target     string
		want       stage
		wantErr    string
	}{
		{
			name: "everything known",
			dockerfile: build + "FROM scratch\n# Why.\nLABEL a.b=c\nCOPY --from=build /rootfs/ /\nENV PATH=/usr/bin\n" +
				`ENTRYPOINT ["gpu-device-plugin", "--x"]`,
			want: stage{
				copies:     []copyLine{{"build", "/rootfs/", "/"}},
				env:        []string{"PATH=/usr/bin"},
				labels:     map[string]string{"a.b": "c"},
				entrypoint: []string{"gpu-device-plugin", "--x"},
			},
		},
		{
			name:       "a stage that begins from another",
			dockerfile: build + "FROM scratch AS base\nENV A=b\nCOPY --from=build /a/ /\nFROM base AS more\nCOPY --from=build /b/ /\nFROM base",
			target:     "more",
			want: stage{
				copies: []copyLine{{"build", "/a/", "/"}, {"build", "/b/", "/"}}, env: []string{"A=b"}, labels: map[string]string{},
			},
		},
		{
			name:       "the last stage begins from another",
			dockerfile: build + "FROM scratch AS base\nENV A=b\nFROM base AS more\nENV C=d\nFROM base",
			want:       stage{env: []string{"A=b"}, labels: map[string]string{}},
		},
		{name: "no such target", dockerfile: build + "FROM scratch", target: "compat", wantErr: `stage "compat"`},
		{name: "a stage with options", dockerfile: build + "FROM --platform=x scratch", wantErr: "FROM BASE AS NAME"},
		{name: "instruction unknown", dockerfile: build + "FROM scratch\nUSER 65532", wantErr: `"USER 65532"`},
		{name: "continued line", dockerfile: build + "FROM scratch\nRUN a \\\n  b", wantErr: `"RUN a b"`},
		{name: "value that needs a shell's rules", dockerfile: build + "FROM scratch\nENV A=$B", wantErr: `"ENV A=$B"`},
		{name: "copy from the context", dockerfile: build + "FROM scratch\nCOPY a /", wantErr: "COPY --from"},
		{name: "base from a registry", dockerfile: build + "FROM debian", wantErr: `"FROM debian"`},
		{name: "no stage", dockerfile: "# Nothing.", wantErr: "no FROM"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := readStage(tt.dockerfile, tt.target)
			if tt.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), tt.wantErr) {
					t.Fatalf("error %v, want one that says %s", err, tt.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(stage{}, copyLine{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}
