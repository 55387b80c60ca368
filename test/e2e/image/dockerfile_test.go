package image

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFinalStage(t *testing.T) {
	t.Parallel()
	const build = "FROM golang AS build\nRUN a \\\n  && b\n\n"
	tests := []struct {
		name       string
		dockerfile string
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
			got, err := finalStage(tt.dockerfile)
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
